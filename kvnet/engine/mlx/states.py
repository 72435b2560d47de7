"""What a request starts from: the longest of live cache, restore plan and nothing; and what becomes of it afterwards.

All of it happens in the prefill lane, except ``keep``, which the decode thread calls too.
"""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import KVCache

from kvnet.engine.kv_state import Origin, RestorePlan
from kvnet.engine.mlx.budget import Budget
from kvnet.engine.mlx.caches import copy_rows
from kvnet.engine.mlx.live import Loan, Shelf, cuttable, point_of
from kvnet.engine.mlx.loader import LoadedModel
from kvnet.engine.mlx.requests import CancelledRequestError, Request
from kvnet.engine.mlx.restoring import restore
from kvnet.errors import CompatibilityError, NoLiveStateError

ANSWER_ROOM_TOKENS = 2048
"""Rows kept free for the answer at most. An answer that is longer grows its cache as mlx-lm does, every 256 tokens."""

MIN_SYSTEM_TOKENS = 64
"""Shorter system prompts get no entry of their own: computing them again costs less than a step."""


MOVED_SHARE = (15, 16)
"""Part of a large live cache that a request must continue from to take it over instead of copying it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request may start from, and what it needs.

    Attributes:
        tokens: of the prompt or prefix.
        plan: state to restore when no live cache holds more.
        limit: of how many tokens state may be taken over.
        answer_tokens: how many tokens may follow.
        use_live: look for live caches.
        keep_live: leave a live cache behind.
        read_only: a live cache that covers everything is read where it is.
        compute: tokens that nothing covers may be computed.
    """

    tokens: Sequence[int]
    plan: RestorePlan | None
    limit: int
    answer_tokens: int = 0
    use_live: bool = False
    keep_live: bool = False
    read_only: bool = False
    compute: bool = True

    @property
    def total_tokens(self) -> int:
        """Tokens to reserve memory for."""
        return len(self.tokens) + self.answer_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens to make room for at once."""
        return len(self.tokens) + min(self.answer_tokens, ANSWER_ROOM_TOKENS)


@dataclass(slots=True)
class State:
    """Caches of one request and how they came to be.

    Attributes:
        caches: evaluated at ``position``; private to the request unless ``loan`` says otherwise.
        position: tokens in the caches.
        live_tokens: tokens continued from a live cache.
        restored_tokens: tokens restored from the plan.
        restore_s: seconds until the caches were there.
        prefill_s: seconds of prefill.
        origins: artifacts the beginning was restored from.
        points: states of layers that cannot be cut, passed on the way.
        release: gives back the memory; does so once.
        loan: the live cache that is read in place.
    """

    caches: list[Any]
    position: int = 0
    live_tokens: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    origins: tuple[Origin, ...] = ()
    points: dict[int, Sequence[Any]] = field(default_factory=dict)
    epoch: int = 0
    release: Callable[[], None] = lambda: None
    loan: Loan | None = None

    @property
    def reused_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.live_tokens + self.restored_tokens


class States:
    """Starts requests and keeps what they leave.

    Args:
        loaded: the model.
        budget: admission.
        shelf: live caches.
        waiting: how many tokens of a prompt the requests that wait share with it at most.
        give_way: drops work that can be done again later, to free its memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        shelf: Shelf,
        *,
        waiting: Callable[[Sequence[int]], int] = lambda _: 0,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._loaded = loaded
        self._budget = budget
        self._shelf = shelf
        self._waiting = waiting
        self._give_way = give_way

    def begin(self, request: Request, wish: Wish) -> State:
        """State to go on from, its memory reserved.

        Raises:
            CancelledRequestError: while it waited.
            BusyError: the memory did not become free in time.
            NoLiveStateError: something would have to be computed, against the wish.
            CompatibilityError, IntegrityError, EngineError: as ``restore``.
        """
        epoch = self._shelf.epoch
        loan = self._loan(wish)
        try:
            self._check_covered(wish, loan)
            if loan is not None and wish.read_only and loan.n_tokens == len(wish.tokens):
                return self._read(loan)
            release = self._reserve(request, wish, loan)
            try:
                state = self._continued(wish, loan) if loan is not None else self._restored(request, wish)
            except BaseException:
                release()
                raise
        except BaseException:
            if loan is not None:
                loan.give_back()
            raise
        state.release, state.epoch = release, epoch
        return state

    def _loan(self, wish: Wish) -> Loan | None:
        loan = self._shelf.borrow(wish.tokens, wish.limit) if wish.use_live and wish.limit else None
        if loan is not None and loan.n_tokens < _planned(wish):
            loan.give_back()
            return None
        return loan

    def _check_covered(self, wish: Wish, loan: Loan | None) -> None:
        covered = loan.n_tokens if loan is not None else _planned(wish)
        if not wish.compute and covered < len(wish.tokens):
            raise NoLiveStateError(
                f"expected K/V of {len(wish.tokens):,} tokens, found {covered:,} in RAM or restorable"
            )

    def _reserve(self, request: Request, wish: Wish, loan: Loan | None) -> Callable[[], None]:
        taken = self._budget.acquire(
            wish.total_tokens,
            lambda: request.cancelled,
            since_s=request.accepted_s,
            movable_bytes=loan.entry.size_bytes if loan is not None and loan.alone else 0,
            give_way=self._give_way,
        )
        if not taken:
            raise CancelledRequestError
        return _once(lambda: self._budget.release(wish.total_tokens))

    def _read(self, loan: Loan) -> State:
        n_tokens = loan.n_tokens
        return State(
            loan.entry.caches,
            position=n_tokens,
            live_tokens=n_tokens,
            origins=loan.entry.origins_to(n_tokens),
            release=loan.give_back,
            loan=loan,
        )

    def _continued(self, wish: Wish, loan: Loan) -> State:
        began = time.monotonic()
        n_tokens, entry = loan.n_tokens, loan.entry
        state = State(
            [],
            position=n_tokens,
            live_tokens=n_tokens,
            origins=entry.origins_to(n_tokens),
            points=entry.points_to(n_tokens),
        )
        take = loan.moved if self._may_move(wish, loan) else loan.copied
        state.caches = take(wish.capacity_tokens)
        state.restore_s = time.monotonic() - began
        return state

    def _may_move(self, wish: Wish, loan: Loan) -> bool:
        if not loan.alone:
            return False
        if self._budget.overdrawn():
            # There is no room for both: as if it had been evicted, only that somebody still has the use of it.
            return True
        large = loan.entry.size_bytes >= self._shelf.min_move_bytes
        # A conversation that others wait to continue from stays where they find it.
        shared = self._waiting(wish.tokens) > loan.n_tokens // 2
        # A retry of the last turn throws away the old answer at most.
        nearly_all = loan.n_tokens * MOVED_SHARE[1] >= len(loan.entry.tokens) * MOVED_SHARE[0]
        return wish.keep_live and nearly_all and large and not loan.entry.system and not shared

    def _restored(self, request: Request, wish: Wish) -> State:
        n_tokens = _planned(wish)
        if wish.plan is None or n_tokens == 0:
            return State(self._loaded.new_caches())
        info = self._loaded.info
        if info.fingerprint is None:
            raise CompatibilityError(f"{info.name} cannot restore state: {info.refusal}")
        began = time.monotonic()
        caches = restore(
            RestorePlan(wish.plan.manifest, n_tokens, wish.plan.chunks),
            info.fingerprint,
            capacity_tokens=wish.capacity_tokens,
            between=request.raise_if_cancelled,
        )
        return State(
            caches,
            position=n_tokens,
            restored_tokens=n_tokens,
            restore_s=time.monotonic() - began,
            origins=(Origin(wish.plan.manifest, n_tokens),),
        )

    def mark(self, state: State, position: int, *, point: bool) -> None:
        """Notes that the caches are evaluated at ``position``, and keeps a point there if they cannot be cut."""
        state.position = position
        if point and not cuttable(state.caches):
            state.points[position] = point_of(state.caches)

    def keep(self, state: State, caches: list[Any], tokens: Sequence[int]) -> int:
        """Turns a request's memory into a live cache of exactly ``tokens``; how many of them are held then."""
        _tighten(caches)
        with self._budget.lock:
            state.release()
            return self._shelf.put(
                tokens,
                caches,
                points=state.points,
                origins=state.origins,
                epoch=state.epoch,
                room_bytes=self._budget.live_room_bytes(),
            )

    def keep_system(self, state: State, tokens: Sequence[int], n_tokens: int) -> None:
        """Keeps a copy of the system prompt, so that other conversations find it while this one runs."""
        if not MIN_SYSTEM_TOKENS <= n_tokens < state.position or self._shelf.covered(tokens[:n_tokens]) == n_tokens:
            return
        whole = cuttable(state.caches)
        if not whole and n_tokens not in state.points:
            return
        with self._budget.lock:
            if self._budget.live_room_bytes() < self._shelf.size_bytes:
                return
            self._shelf.put(
                tokens[:n_tokens],
                _copy_at(state, n_tokens),
                points={n: point for n, point in state.points.items() if n < n_tokens},
                origins=tuple(Origin(o.manifest, min(o.n_tokens, n_tokens)) for o in state.origins),
                epoch=state.epoch,
                room_bytes=self._budget.live_room_bytes(),
                system=True,
            )

    def abandon(self, state: State, tokens: Sequence[int], *, keep: bool, error: BaseException) -> None:
        """What a request that ended early computed goes to the shelf, as far as it is whole; the memory is free."""
        caches, state.caches = state.caches, []
        whole = isinstance(error, CancelledRequestError) or cuttable(caches)
        at_rest = all(getattr(cache, "offset", state.position) == state.position for cache in caches)
        if keep and whole and at_rest and state.position:
            self.keep(state, caches, tokens[: state.position])
        state.release()


def _tighten(caches: list[Any]) -> None:
    """Gives back free rows of short conversations, a layer at a time; for long ones the copy is not worth it."""
    for layer, cache in enumerate(caches):
        if type(cache) is KVCache and cache.keys is not None and cache.keys.shape[2] > cache.offset * 5 // 4 + 512:
            caches[layer] = copy_rows(cache, cache.offset, cache.offset)


def _planned(wish: Wish) -> int:
    return min(wish.plan.n_tokens, wish.limit) if wish.plan is not None else 0


def _copy_at(state: State, n_tokens: int) -> list[Any]:
    others = iter(copy.deepcopy(list(state.points.get(n_tokens, ()))))
    return [copy_rows(c, n_tokens, n_tokens) if type(c) is KVCache else next(others) for c in state.caches]


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """The action, done at the first call only."""
    done = threading.Lock()
    return lambda: action() if done.acquire(blocking=False) else None
