"""What every store does in the same way, by what each does in its own."""

from pathlib import Path

from kvnet.format.hashes import ArtifactHash
from kvnet.store.containers import export_artifact, import_artifact
from kvnet.store.interface import ArtifactRecord, Judge, KeysOf, PackWriter, SignedBeginning, Store, Verified
from kvnet.store.osfile import OsFiles
from kvnet.store.reading import read_context, read_tokens, require, verify_artifact


class BasicStore(Store):
    """See :class:`kvnet.store.interface.Store`.

    Args:
        files: the seam to the operating system.
    """

    def __init__(self, files: OsFiles) -> None:
        self._files = files

    def note_beginning(self, writer: PackWriter, beginning: SignedBeginning) -> None:
        """See the interface. Nothing of this store outlives its process."""
        del writer, beginning

    def tokens_of(self, artifact: ArtifactHash) -> list[int]:
        """See the interface."""
        return read_tokens(self, require(self, artifact))

    def context_of(self, artifact: ArtifactHash) -> bytes | None:
        """See the interface."""
        return read_context(self, require(self, artifact))

    def verify(self, artifact: ArtifactHash) -> Verified:
        """See the interface."""
        return verify_artifact(self, require(self, artifact))

    def remove(self, artifact: ArtifactHash) -> int:
        """See the interface."""
        return self.release(artifact) + self.compact()

    def export(self, artifact: ArtifactHash, path: Path) -> int:
        """See the interface."""
        return export_artifact(self, self._files, require(self, artifact), path)

    def import_container(
        self, path: Path, *, judge: Judge, keys_of: KeysOf | None = None, pinned: bool = False
    ) -> ArtifactRecord:
        """See the interface."""
        return import_artifact(self, path, judge=judge, keys_of=keys_of, pinned=pinned)
