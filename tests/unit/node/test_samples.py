import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvnet.engine.model_folder import ModelEntry, Quantisation, inspect_model
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.errors import MalformedError
from kvnet_node.samples import SampleBook, model_names
from tests.unit.node.test_engines import make_model


def engine_of(folder: Path) -> ToyEngine:
    return ToyEngine(folder, ToyCosts(), 1 << 20, 1 << 40)


def entry_of(folder: Path) -> ModelEntry:
    entry = inspect_model(folder)
    assert entry is not None
    return entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "Toy-1B-4bit")


@pytest.fixture
def book(tmp_path: Path) -> SampleBook:
    return SampleBook(tmp_path / "samples")


async def test_a_model_that_was_loaded_once_is_known_at_the_next_start(
    book: SampleBook, folder: Path, tmp_path: Path
) -> None:
    engine = engine_of(folder)
    packed = replace(entry_of(folder), quantisation=Quantisation(4, 64))
    assert book.note(packed, engine.info)
    assert not book.note(packed, engine.info)
    book.put(packed, engine.info, await engine.sample())
    again = SampleBook(tmp_path / "samples")
    again.load()
    (own,) = again.models()
    assert own.here.fingerprint == engine.info.fingerprint
    assert (own.here.packing.bits, own.here.packing.group) == (4, 64)
    assert own.sample == await engine.sample()
    assert again.own(folder) == own


def test_a_model_keeps_its_name_after_its_folder_is_gone(book: SampleBook, folder: Path, tmp_path: Path) -> None:
    assert model_names(tmp_path / "samples") == {}
    info = engine_of(folder).info
    book.note(entry_of(folder), info)
    shutil.rmtree(folder)
    assert info.fingerprint is not None
    assert model_names(tmp_path / "samples") == {info.fingerprint.hash: "Toy-1B-4bit"}
    (tmp_path / "samples" / "models.json").write_text("{")
    assert model_names(tmp_path / "samples") == {}


async def test_a_folder_whose_files_changed_is_unknown_again(book: SampleBook, folder: Path, tmp_path: Path) -> None:
    book.note(entry_of(folder), engine_of(folder).info)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    again = SampleBook(tmp_path / "samples")
    again.load()
    assert again.models() == []


async def test_a_folder_that_is_gone_is_unknown_and_hides_no_other(
    book: SampleBook, folder: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path, "Other")
    for each in (folder, other):
        book.note(entry_of(each), engine_of(each).info)
    assert [own.here.name for own in book.models()] == ["Other", "Toy-1B-4bit"]
    shutil.rmtree(folder)
    again = SampleBook(tmp_path / "samples")
    again.load()
    assert [own.here.name for own in again.models()] == ["Other"]


async def test_a_damaged_sample_is_no_sample(book: SampleBook, folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    book.put(entry_of(folder), engine.info, await engine.sample())
    (file,) = (tmp_path / "samples").glob("*.sample")
    file.write_bytes(file.read_bytes()[:-1])
    again = SampleBook(tmp_path / "samples")
    again.load()
    (own,) = again.models()
    assert own.sample == b""
    with pytest.raises(MalformedError):
        book.put(entry_of(folder), engine.info, b"nonsense")


async def test_a_damaged_book_is_an_empty_one(book: SampleBook, folder: Path, tmp_path: Path) -> None:
    book.note(entry_of(folder), engine_of(folder).info)
    (tmp_path / "samples" / "models.json").write_text("{")
    again = SampleBook(tmp_path / "samples")
    again.load()
    assert again.models() == []


async def test_a_model_whose_state_cannot_be_shared_is_not_kept(book: SampleBook, folder: Path) -> None:
    info = replace(engine_of(folder).info, fingerprint=None)
    assert not book.note(entry_of(folder), info)
    book.put(entry_of(folder), info, b"")
    assert book.models() == []


async def test_figures_that_make_no_sense_are_not_told(book: SampleBook, folder: Path) -> None:
    odd = replace(entry_of(folder), quantisation=Quantisation(1 << 40, -3))
    book.note(odd, engine_of(folder).info)
    assert book.models()[0].here.packing.bits == 0
