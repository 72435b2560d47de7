"""K/V kept in RAM between requests: what is reused, what is shared, what is left behind."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mlx

CASES = (
    "every_length_from_live_equals_cold",
    "the_same_prompt_twice_and_one_token_more_or_less_equal_cold",
    "a_conversation_continues_from_its_own_answer",
    "layers_that_cannot_be_cut_continue_at_boundaries_only",
    "simultaneous_requests_over_one_live_cache_and_an_export_equal_sequential_ones",
    "a_moved_cache_comes_back_after_cancellation",
    "private_requests_leave_nothing_and_take_nothing_away",
    "state_that_cannot_be_shared_counts_as_much_as_it_takes",
    "live_caches_go_when_running_requests_need_their_memory",
    "system_prompts_are_evicted_last",
    "waiting_for_memory_ends_with_figures",
    "exports_read_live_caches_and_hold_exactly_their_tokens",
    "exports_name_what_their_live_cache_came_from",
    "background_exports_give_way_between_blocks",
    "dropping_live_caches_also_drops_what_running_requests_would_leave",
    "nothing_is_kept_with_a_cap_of_zero",
)


@pytest.mark.parametrize("case", CASES)
def test_live_caches(case: str, repository_root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mlx.live_cases", str(tmp_path), case],
        capture_output=True,
        text=True,
        cwd=repository_root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
