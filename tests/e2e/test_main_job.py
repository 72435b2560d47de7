"""The main job through the installed command: add on one node, fetch and decode on another; with a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

TEXT = "".join(
    f"Line {number}: the keeper notes wind, cloud and tide before the lamp is lit.\n" for number in range(12)
)
QUESTION = "What does the keeper note?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.write_model(tmp_path_factory.mktemp("models") / "tiny-other", seed=1)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "keeper.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def add(kvnet: Kvnet, document: Path, model: Path, name: str = "keeper") -> dict[str, Any]:
    return kvnet.json("add", str(document), "--name", name, "--model", str(model))


def ask(kvnet: Kvnet, *flags: str, name: str = "keeper") -> dict[str, Any]:
    return kvnet.json("ask", name, QUESTION, "--max-tokens", "8", *flags)


def pair(kvnet: Kvnet, other: Kvnet, tmp_path: Path, *, trust: bool = True) -> None:
    """Make ``other`` a member of the namespace of ``kvnet``, and have it trust its key."""
    file = tmp_path / "pair.kvns"
    kvnet.json("namespace", "export", str(file))
    other.json("namespace", "import", str(file))
    file.unlink()
    if trust:
        other.json("key", "trust", kvnet.json("key", "show")["publisher"])


def test_what_was_added_is_listed_verified_and_reused(kvnet: Kvnet, document: Path, model: Path) -> None:
    kvnet.start()
    added = add(kvnet, document, model)
    assert {"artifact", "name", "version", "tokens", "bytes", "new_bytes", "reused_tokens", "prefilled_tokens"} <= (
        added.keys()
    )
    assert (added["version"], added["reused_tokens"], added["prefilled_tokens"]) == (1, 0, added["tokens"])
    (listed,) = kvnet.json("list")["artifacts"]
    assert (listed["artifact"], listed["names"]) == (added["artifact"], ["keeper@1"])
    assert listed["complete"]
    assert listed["pinned"]
    assert listed["own"]
    short = added["artifact"][: len("bafyr4i") + 8]
    for target in ("keeper", "keeper@1", short, added["artifact"]):
        assert kvnet.json("show", target)["artifact"] == added["artifact"]
    assert kvnet.json("verify")["bad_chunks"] == []
    cold, warm = ask(kvnet, "--no-reuse"), ask(kvnet)
    assert cold["text"] == warm["text"] != ""
    assert (cold["reused_tokens"], warm["reused_tokens"]) == (0, added["tokens"])
    assert warm["sources"][0]["source"] == "disk"
    assert warm["sources"][0]["artifact"] == added["artifact"]


def test_adding_again_keeps_the_version_and_an_edit_computes_only_what_changed(
    kvnet: Kvnet, document: Path, model: Path
) -> None:
    kvnet.start()
    first = add(kvnet, document, model)
    again = add(kvnet, document, model)
    assert (again["artifact"], again["version"], again["prefilled_tokens"]) == (first["artifact"], 1, 0)
    document.write_text(TEXT + "A last line.\n", encoding="utf-8")
    edited = add(kvnet, document, model)
    assert edited["version"] == 2
    assert edited["artifact"] != first["artifact"]
    assert edited["reused_tokens"] > first["tokens"] - 80
    assert edited["prefilled_tokens"] < 160
    assert kvnet.json("show", "keeper")["artifact"] == edited["artifact"]
    assert kvnet.json("show", "keeper@1")["artifact"] == first["artifact"]


def test_verbs_work_without_a_running_node(kvnet: Kvnet, document: Path, model: Path) -> None:
    added = add(kvnet, document, model)
    assert ask(kvnet)["reused_tokens"] == added["tokens"]


def test_a_dry_run_computes_and_keeps_nothing(kvnet: Kvnet, document: Path, model: Path) -> None:
    ran = kvnet("add", str(document), "--name", "keeper", "--model", str(model), "--dry-run")
    assert ran.code == 0
    assert "tokens" in ran.stdout
    assert kvnet.json("list")["artifacts"] == []


def test_a_dry_run_refuses_what_the_add_would_refuse(kvnet: Kvnet, model: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("more than any small window holds. " * 4000)
    command = ("add", str(tmp_path / "long.txt"), "--name", "long", "--model", str(model))
    dry, wet = kvnet(*command, "--dry-run"), kvnet(*command)
    assert (dry.code, dry.stdout, dry.stderr) == (wet.code, wet.stdout, wet.stderr)
    assert dry.code == 80
    assert "add fewer or shorter files" in dry.stderr


def test_an_answer_streams_to_stdout_and_explains_itself_on_stderr(kvnet: Kvnet, document: Path, model: Path) -> None:
    kvnet.start()
    add(kvnet, document, model)
    ran = kvnet("ask", "keeper", QUESTION, "--max-tokens", "8")
    assert ran.code == 0
    assert ran.stdout.rstrip("\n") != ""
    assert "tokens from this node's disk" in ran.stderr
    assert "policy trusted" in ran.stderr
    events = kvnet("--json", "ask", "keeper", QUESTION, "--max-tokens", "8").lines
    assert events[-1]["type"] == "ask"
    assert "".join(event["text"] for event in events if event["type"] == "text") == events[-1]["text"]


@pytest.mark.parametrize("name", ["private", "bafyr4ikeeper", "Upper", "-dash", "a" * 65, "a/b", "a@1"])
def test_names_that_would_mislead_are_refused(kvnet: Kvnet, document: Path, model: Path, name: str) -> None:
    ran = kvnet("add", str(document), f"--name={name}", "--model", str(model))
    assert (ran.code, ran.stdout) == (2, "")


def test_without_a_model_the_choices_are_listed(kvnet: Kvnet, document: Path, model: Path, other_model: Path) -> None:
    paths = f"{model},{other_model}"
    ran = kvnet("add", str(document), "--name", "keeper", KVNET_MODEL_PATHS=paths)
    assert ran.code == 2
    assert "tiny-llama" in ran.stderr
    assert "tiny-other" in ran.stderr
    unknown = kvnet("add", str(document), "--name", "keeper", "--model", "no-such", KVNET_MODEL_PATHS=paths)
    assert unknown.code == 2
    assert "no-such" in unknown.stderr


def test_a_fetched_artifact_is_reused_with_the_same_text_and_names_its_signer(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    pair(kvnet, other, tmp_path)
    started, _ = kvnet.start()
    added = add(kvnet, document, model)
    # No node runs for `other`: a short-lived one fetches, and no model is needed.
    fetched = other.json("fetch", added["artifact"], "--from", started["addresses"][0], "--name", "lamp")
    assert (fetched["artifact"], fetched["complete"], fetched["name"]) == (added["artifact"], True, "lamp")
    assert fetched["fetched_chunks"] == fetched["chunks"] > 0
    assert [provided["peer"] for provided in fetched["providers"]] == [started["peer"]]
    publisher = kvnet.json("key", "show")["publisher"]
    assert fetched["signer"] == publisher
    again = other.json("fetch", added["artifact"], "--from", started["addresses"][0])
    assert again["fetched_chunks"] == 0
    answer = other.json("ask", "lamp", QUESTION, "--max-tokens", "8", KVNET_MODEL_PATHS=str(model))
    assert answer["reused_tokens"] == added["tokens"]
    assert answer["sources"][0]["signer"] == publisher
    assert answer["text"] == ask(kvnet, "--no-reuse")["text"]


def test_a_prompt_finds_its_longest_prefix_among_peers_and_afterwards_on_the_own_disk(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    pair(kvnet, other, tmp_path)
    started, _ = kvnet.start()
    added = add(kvnet, document, model)
    other.start("--bootstrap", started["addresses"][0])
    other.json("peers", started["addresses"][0])
    chat = tmp_path / "chat.json"
    layout = f"=== {document.name} ===\n{TEXT}\n"
    messages = [{"role": "system", "content": layout}, {"role": "user", "content": QUESTION}]
    chat.write_text(json.dumps(messages), encoding="utf-8")
    flags = ("generate", "--model", str(model), "--chat", str(chat), "--max-tokens", "8")
    cold = other.json(*flags, "--no-reuse")
    assert other.json("list")["artifacts"] == []
    # Peers have no longer to answer than the prefill is worth: a quarter of a second with so small a model.
    peer = other.until(lambda seen: [source["source"] for source in seen["sources"]] == ["peer"], *flags)
    assert peer["sources"][0]["peer"] == started["peer"]
    assert peer["reused_tokens"] == added["tokens"]
    # What was fetched goes by the name the model has here.
    other.until(lambda seen: [each["model"] for each in seen["artifacts"]] == [model.name], "list")
    assert other.json("show", added["artifact"])["model"] == model.name
    kvnet.json("node", "stop")
    disk = other.json(*flags)
    assert [source["source"] for source in disk["sources"]] == ["disk"]
    assert cold["text"] == peer["text"] == disk["text"] != ""


def test_an_untrusted_publisher_is_refused_with_the_next_step(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    pair(kvnet, other, tmp_path, trust=False)
    started, _ = kvnet.start()
    added = add(kvnet, document, model)
    ran = other("fetch", added["artifact"], "--from", started["addresses"][0])
    assert (ran.code, ran.stdout) == (30, "")
    assert "key trust" in ran.stderr
    assert other.json("list")["artifacts"] == []


def test_a_peer_without_the_namespace_gets_nothing(kvnet: Kvnet, other: Kvnet, document: Path, model: Path) -> None:
    started, _ = kvnet.start()
    added = add(kvnet, document, model)
    other.json("key", "trust", kvnet.json("key", "show")["publisher"])
    ran = other("fetch", added["artifact"], "--from", started["addresses"][0])
    assert (ran.code, ran.stdout) == (60, "")


def test_a_container_moves_an_artifact_and_its_bytes_are_checked(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    pair(kvnet, other, tmp_path)
    added = add(kvnet, document, model)
    file = tmp_path / "keeper.kva"
    exported = kvnet.json("export", "keeper", "-o", str(file))
    assert exported["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0
    assert kvnet("export", "keeper", "-o", str(file)).code == 2
    damaged = tmp_path / "damaged.kva"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert other("import", str(damaged)).code in {10, 20}
    assert other.json("list")["artifacts"] == []
    imported = other.json("import", str(file), "--name", "keeper")
    assert (imported["artifact"], imported["complete"]) == (added["artifact"], True)
    assert (
        other.json("ask", "keeper", QUESTION, "--max-tokens", "8", KVNET_MODEL_PATHS=str(model))["reused_tokens"]
        == (added["tokens"])
    )


def test_a_container_of_an_untrusted_publisher_is_refused(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    add(kvnet, document, model)
    kvnet.json("export", "keeper", "-o", str(tmp_path / "keeper.kva"))
    assert other("import", str(tmp_path / "keeper.kva")).code == 30


def test_pins_removal_and_the_rebuilt_index(kvnet: Kvnet, document: Path, model: Path) -> None:
    added = add(kvnet, document, model)
    assert kvnet.json("gc", "--all")["removed"] == []
    (kvnet.data_dir / "store").joinpath("index.sqlite3").unlink(missing_ok=True)
    rebuilt = kvnet.json("store", "rebuild")
    assert (rebuilt["artifacts"], rebuilt["refused"]) == (1, [])
    assert kvnet.json("show", "keeper")["pinned"] is True
    assert kvnet.json("unpin", "keeper")["pinned"] is False
    assert kvnet.json("pin", "keeper")["pinned"] is True
    assert kvnet("pin", "keeper").stdout == f"pinned keeper@1 ({added['artifact']})\n"
    removed = kvnet.json("rm", "keeper")
    assert (removed["artifact"], removed["names"]) == (added["artifact"], ["keeper@1"])
    assert removed["freed_bytes"] > 0
    assert kvnet("show", added["artifact"]).code == 50
    assert kvnet("show", "keeper").code == 2


def test_a_namespace_that_holds_artifacts_is_replaced_only_when_kept(
    kvnet: Kvnet, other: Kvnet, document: Path, model: Path, tmp_path: Path
) -> None:
    add(kvnet, document, model)
    file = tmp_path / "theirs.kvns"
    other.json("namespace", "export", str(file))
    refused = kvnet("namespace", "import", str(file))
    assert refused.code == 50
    assert "1 artifact" in refused.stderr
    assert "--keep-old" in refused.stderr
    kvnet.json("namespace", "import", str(file), "--keep-old")
    assert [entry["artifacts"] for entry in kvnet.json("namespace", "list")["namespaces"]] == [0, 1]
    assert ask(kvnet, name="keeper")["reused_tokens"] > 0


def test_the_self_test_passes_and_status_remembers_it(kvnet: Kvnet, model: Path) -> None:
    assert "reuse verified  not on this machine yet" in kvnet("status").stdout
    result = kvnet.json("selftest", "--model", str(model))
    assert result["passed"]
    assert result["equal_text"]
    assert kvnet.json("status")["reuse_verified"] == ["tiny-llama"]


@pytest.mark.parametrize("n_bytes", [1, 257])
def test_the_same_prompt_twice_gives_the_same_text(kvnet: Kvnet, model: Path, n_bytes: int) -> None:
    flags = ("generate", "--model", str(model), f"--prompt={'x' * n_bytes}", "--max-tokens", "4")
    kvnet.start()
    texts = {kvnet.json(*flags)["text"] for _ in range(2)} | {kvnet.json(*flags, "--no-reuse")["text"]}
    assert len(texts) == 1
    assert texts != {""}
