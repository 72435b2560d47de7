"""Letting artifacts go: markers and packs, changed while nobody waits for it.

What an owner removes must not come back: a marker file is on the medium first, then the index lists the artifact no
longer, then its packs go, and the marker last. What is evicted may as well come back when the power fails, and waits
for nothing.

No file is touched while the store's lock is held: whoever adds needs that lock, and a disk may take long over a file.
An artifact whose files are being changed is *in flux* instead, and only an add of the very same artifact waits for it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvnet.errors import StoreError, StoreFullError
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.failures import storage_errors
from kvnet.store.index import ArtifactRow, Index, PackRow
from kvnet.store.opening import Parts
from kvnet.store.presence import Gate
from kvnet.store.reading import not_held

_log = logging.getLogger(__name__)


class Removing:
    """Lets artifacts and packs go, one after the other.

    Args:
        gate: the store's lock.
        parts: the open store.
    """

    def __init__(self, gate: Gate, parts: Parts) -> None:
        self._gate = gate
        self._parts = parts
        self._files = parts.files
        self._paths = parts.paths
        self.turn = threading.RLock()
        """Whoever changes files holds it, and owns what is in flux; taken before the gate, never while holding it."""
        self._in_flux: set[ArtifactHash] = set()
        self._may_come_back: set[ArtifactHash] = set()

    def wait_until_settled(self, artifact: ArtifactHash) -> None:
        """Wait until nobody changes the files of an artifact. The gate is held, and is again at the end."""
        self._gate.wait_for(lambda: artifact not in self._in_flux)

    def remove(self, artifact: ArtifactHash) -> int:
        """Remove an artifact for good, and packs of which nothing is used any more; returns the bytes freed.

        Raises:
            NotInStoreError: it is not held.
            StoreError: the disk failed; it may be gone when the store opens again.
        """
        marker = self._paths.removed / artifact_text(artifact)
        with self.turn:
            with self._gate:
                if self._parts.index.artifact(artifact) is None:
                    raise not_held(artifact)
                self._in_flux.add(artifact)
                temporary = self._parts.space.temporary_path()
            try:
                with storage_errors("removing an artifact"):
                    self._files.write_whole(marker, b"", temporary)
                self._may_come_back.discard(artifact)
                with self._gate:
                    row = self._parts.index.artifact(artifact)
                    listed = row is not None and not self._unlisted(row)
                if row is not None and listed:
                    self._unlist_on_a_full_disk(row)
                with storage_errors("removing an artifact"):
                    self._files.unlink(self._paths.pins / marker.name)
                return self.collect()
            finally:
                self._settled([artifact])

    def evict(self, artifact: ArtifactHash, *, spare: Callable[[ArtifactRow], bool] = lambda _: False) -> bool:
        """Let go of an artifact that is not pinned, and of packs of which nothing is used any more; whether it went.

        Args:
            artifact: it may have been pinned, used or removed since it was chosen.
            spare: asked whether it is to stay after all.

        Raises:
            StoreError: the disk failed.
        """
        with self.turn:
            with self._gate:
                row = self._parts.index.artifact(artifact)
                if row is None or row.pinned or spare(row):
                    return False
                listed = not self._unlisted(row)
                self._in_flux.add(artifact)
                self._may_come_back.add(artifact)
            try:
                if listed:
                    self._unlist_on_a_full_disk(row)
                with self._gate:
                    self._parts.space.evicted.append(artifact)
                    stays = any(self._parts.space.needed(pack) for pack in self._parts.index.packs_of(artifact))
                if stays:
                    # Or the next opening would list it again, with what others need of its pack.
                    self._mark(artifact)
                self.collect()
            finally:
                self._settled([artifact])
            return True

    def _unlist(self, row: ArtifactRow) -> None:
        with self._parts.index.transaction():
            self._parts.index.drop_artifact(row.id)

    def _unlisted(self, row: ArtifactRow) -> bool:
        """Have the index list an artifact no longer; False when the disk has no room even for that."""
        try:
            self._unlist(row)
        except StoreFullError:
            return False
        return True

    def _unlist_on_a_full_disk(self, row: ArtifactRow) -> None:
        """Make room for the index with what is to go anyway: the packs that nothing else uses.

        When this fails or is interrupted, the next opening finds the packs gone and lists the artifact no longer.
        """
        with self._gate:
            leased = {chunk for chunks in self._parts.space.leases.values() for chunk in chunks}
            own = [
                pack
                for pack in self._parts.index.packs_of_none_but(row)
                if leased.isdisjoint(chunk.hash for chunk in self._parts.index.chunks_of_pack(pack.id))
            ]
        with storage_errors("removing a pack"):
            for pack in own:
                self._files.unlink(self._paths.pack(pack.name))
        with self._gate:
            self._unlist(row)

    def _mark(self, artifact: ArtifactHash) -> None:
        marker = self._paths.removed / artifact_text(artifact)
        with storage_errors("removing an artifact"):
            self._files.unlink(marker)
            self._files.close(self._files.create(marker))

    def collect(self) -> int:
        """Remove packs of which nothing is used; returns the bytes freed.

        Raises:
            StoreError: the disk failed.
        """
        with self.turn:
            with self._gate:
                index = self._parts.index
                doomed = self._unlist_packs()
                owners = {pack.artifact for pack in doomed} - self._in_flux
                self._in_flux |= owners
            try:
                self._remove_packs(index, doomed)
            finally:
                self._settled(owners)
            return sum(pack.size_bytes for pack in doomed)

    def _unlist_packs(self) -> list[PackRow]:
        index, space = self._parts.index, self._parts.space
        doomed = []
        with index.transaction():
            for pack in index.orphaned_packs():
                # Each is looked at after those before it have gone: of two packs with the same chunks one stays.
                if not space.needed(pack):
                    index.drop_pack(pack.id)
                    doomed.append(pack)
        space.leaving_bytes += sum(pack.size_bytes for pack in doomed)
        return doomed

    def _remove_packs(self, index: Index, doomed: Iterable[PackRow]) -> None:
        """Remove files that nothing lists any more. One that cannot be is taken in again when the store opens."""
        failure: StoreError | None = None
        gone: set[ArtifactHash] = set()
        stay: set[ArtifactHash] = set()
        for pack in doomed:
            try:
                if self._parts.index is index:  # else the store was opened again meanwhile, and lists it again
                    self._remove_pack(pack)
                gone.add(pack.artifact)
            except StoreError as error:
                stay.add(pack.artifact)
                failure = failure or error
        self._unmark(gone - stay)
        if failure is not None:
            raise failure

    def _remove_pack(self, pack: PackRow) -> None:
        path = self._paths.pack(pack.name)
        with storage_errors("removing a pack"):
            self._files.unlink(path)
            if pack.artifact not in self._may_come_back:
                # The marker goes after the pack, or a power failure would bring back what somebody had removed.
                self._files.sync_directory(path.parent)

        def gone() -> None:
            self._parts.space.leaving_bytes = max(0, self._parts.space.leaving_bytes - pack.size_bytes)

        self._gate.while_away(gone)

    def _unmark(self, artifacts: set[ArtifactHash]) -> None:
        """Remove the markers of artifacts of which no pack is left."""
        if not artifacts:
            return
        with self._gate:
            bare = [one for one in artifacts if not self._parts.index.packs_of(one)]
        for artifact in bare:
            with storage_errors("removing an artifact"):
                self._files.unlink(self._paths.removed / artifact_text(artifact))
            self._may_come_back.discard(artifact)

    def _settled(self, artifacts: Iterable[ArtifactHash]) -> None:
        self._gate.settle(lambda: self._in_flux.difference_update(artifacts))

    def drop_needless_markers(self) -> None:
        """Remove markers of artifacts of which nothing is left that could bring them back. For when the store opens.

        Raises:
            StoreError: the disk failed.
        """
        with storage_errors("looking at markers"):
            left = {artifact_text(pack.artifact) for pack in self._parts.index.packs()}
            for marker in self._paths.removed.iterdir():
                # A folder is no marker of ours, and is left alone.
                if marker.name not in left and not (marker.is_dir() and not marker.is_symlink()):
                    self._files.unlink(marker)

    def remove_partials(self, paths: Iterable[Path]) -> None:
        """Remove partial packs that were taken for it.

        Raises:
            StoreError: the disk failed at one of them; the others went all the same.
        """
        failure: StoreError | None = None
        for path in paths:
            try:
                self._parts.partials.remove(path)
            except StoreError as error:
                failure = failure or error
            finally:
                self._gate.while_away(lambda path=path: self._parts.partials.give_back(path))  # type: ignore[misc]
        if failure is not None:
            raise failure
