"""Data directories made ready without commands: those are tested elsewhere, and each costs a process."""

from pathlib import Path

from kvnet.format.hashes import NamespaceId
from kvnet.store.disk import DiskStore
from kvnet.trust.keys import PublisherKey, publisher_text
from kvnet.trust.namespace import encode_namespace_file
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import prepare_data_dir
from tests.e2e.conftest import Kvnet
from tests.unit.store.samples import MINE, Sample, publish


def prepare(kvnet: Kvnet, folder: Path, *artifacts: Sample, trusts: PublisherKey) -> None:
    """A member of the samples' namespace that trusts ``trusts`` and holds some artifacts, pinned."""
    paths = prepare_data_dir(kvnet.data_dir)
    identity = NodeIdentity(paths, "trusted")
    identity.load()
    file = folder / f"{kvnet.data_dir.name}.kvns"
    file.write_bytes(encode_namespace_file(MINE))
    identity.import_namespace(file, keep_old=False, count=_nothing_yet)
    identity.trust(publisher_text(trusts.public), "")
    if artifacts:
        store = DiskStore.open(paths.store_dir, quota_bytes=1 << 30, min_free_bytes=0, keys_of=identity.keys_of)
        for artifact in artifacts:
            publish(store, artifact, pinned=True)
        store.close()


def _nothing_yet(_: NamespaceId) -> int:
    return 0
