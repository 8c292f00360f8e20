"""Readers: the vendored slices, CIFAR batches, image folders, text; and files that must be refused."""

import gzip
import lzma
import pickle

import numpy as np
import pytest
import torch

from gradwire_lab.data import images, load_images, load_text
from gradwire_lab.data import text as texts
from gradwire_lab.data.cifar import unpickle
from gradwire_lab.data.images import VENDORED, read_idx


def write_idx(path, values):
    """`values` as an xz-compressed IDX file of unsigned bytes."""
    header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(lzma.compress(header + values.tobytes(), preset=9))


def test_vendored_images_are_balanced_and_small():
    data = load_images(full=False)
    assert data.train.images.shape == (12_000, 1, 28, 28)
    assert data.test.images.shape == (2_000, 1, 28, 28)
    assert data.train.labels.bincount().tolist() == [1200] * 10
    assert data.test.labels.bincount().tolist() == [200] * 10
    assert sum(path.stat().st_size for path in VENDORED.iterdir()) < 6e6
    assert (VENDORED / "ATTRIBUTION.md").is_file()


def test_vendored_text_decodes_to_what_was_written():
    data = load_text(full=False)
    text = "".join(data.vocabulary[code] for code in data.train[:2000].tolist())
    assert text.startswith("HAMLET, PRINCE OF DENMARK")
    assert len(data.train) + len(data.test) > 1_000_000
    assert int(data.train.max()) < len(data.vocabulary) < 128
    end = "".join(data.vocabulary[code] for code in data.test[-2000:].tolist())
    assert "Juliet and her Romeo" in end


def test_an_installed_full_set_is_used_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "INSTALLED", tmp_path)
    assert "vendored" in load_images().source
    for path in VENDORED.glob("*.xz"):
        if path.name.endswith("ubyte.xz"):
            values = read_idx(path)[:50]
            content = (
                bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.tobytes()
            )
            (tmp_path / path.with_suffix(".gz").name).write_bytes(gzip.compress(content))
    assert load_images().source == "Fashion-MNIST, full set"
    assert len(load_images().train) == 50
    assert "vendored" in load_images(full=False).source
    assert "IDX files" in load_images(tmp_path).source


@pytest.mark.parametrize(
    "values", [np.zeros((0, 3), np.uint8), np.arange(24, dtype=np.uint8).reshape(2, 3, 4)]
)
def test_idx_round_trip(tmp_path, values):
    write_idx(tmp_path / "a.xz", values)
    assert np.array_equal(read_idx(tmp_path / "a.xz"), values)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x0d\x01\x00\x00\x00\x01", b"\x00\x00\x08\x01\x00\x00\x00\x05abc"]
)
def test_broken_idx_files_are_refused(tmp_path, content):
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(ValueError, match="broken"):
        read_idx(tmp_path / "broken")


def cifar_batch(path, count, key=b"labels", classes=10):
    labels = [index % classes for index in range(count)]
    pixels = np.arange(count * 3072, dtype=np.int64).astype(np.uint8).reshape(count, 3072)
    path.write_bytes(pickle.dumps({b"data": pixels, key: labels, b"batch_label": b"1 of 5"}, protocol=2))
    return pixels, labels


def test_cifar10_batches(tmp_path):
    pixels, _ = cifar_batch(tmp_path / "data_batch_1", 12)
    cifar_batch(tmp_path / "data_batch_2", 8)
    cifar_batch(tmp_path / "test_batch", 5)
    data = load_images(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (20, 5, 10)
    assert data.source.startswith("CIFAR-10 ")
    assert torch.equal(data.train.images[3], torch.from_numpy(pixels[3].reshape(3, 32, 32)))
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]


def test_cifar100_has_fine_labels(tmp_path):
    cifar_batch(tmp_path / "train", 100, b"fine_labels", 100)
    cifar_batch(tmp_path / "test", 10, b"fine_labels", 100)
    (tmp_path / "meta").write_bytes(b"not read")
    data = load_images(tmp_path)
    assert (data.classes, len(data.train), data.source[:9]) == (100, 100, "CIFAR-100")


class Malicious:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path):
    trap = tmp_path / "ran"
    for attack in (Malicious(exec, f"open({str(trap)!r}, 'w')"), Malicious(open, str(trap), "w")):
        with pytest.raises(ValueError, match="refused"):
            unpickle(pickle.dumps({b"data": attack}, protocol=2), "data_batch_1")
        cifar_batch(tmp_path / "data_batch_1", 2)
        (tmp_path / "test_batch").write_bytes(pickle.dumps(attack, protocol=2))
        with pytest.raises(ValueError, match="test_batch is not a CIFAR batch"):
            load_images(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_truncated_archive_is_refused(tmp_path, suffix):
    pack = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    (tmp_path / f"cut{suffix}").write_bytes(pack(bytes(1000))[:-20])
    with pytest.raises(ValueError, match="cut"):
        read_idx(tmp_path / f"cut{suffix}")


def test_a_pickle_cannot_build_an_array_of_forged_pointers():
    forged = Malicious(np.ndarray, (1,), "O", bytes(range(1, 9)))
    with pytest.raises(ValueError, match="is not a CIFAR batch"):
        unpickle(pickle.dumps({b"labels": forged}, protocol=2), "data_batch_1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02garbage",
        pickle.dumps(np.array([object()], dtype=object), 2),
        pickle.dumps(np.float64(1), 2),
    ],
)
def test_what_no_cifar_batch_contains_is_refused(content):
    with pytest.raises(ValueError, match="is not a CIFAR batch"):
        unpickle(content, "batch")


def test_a_batch_with_other_contents_is_refused(tmp_path):
    cifar_batch(tmp_path / "data_batch_1", 2)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"labels": [1]}, protocol=2))
    with pytest.raises(ValueError, match="no images of 3072 bytes"):
        load_images(tmp_path)


def pictures(folder, classes=("ants", "bees"), count=6):
    image = pytest.importorskip("PIL.Image")
    for index, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image.new("RGB", (40, 20), (80 * index, number, 0)).save(folder / name / f"{number}.png")


def test_image_folder_holds_out_every_sixth_picture(tmp_path):
    pictures(tmp_path, count=8)
    data = load_images(tmp_path)
    assert data.train.images.shape == (12, 3, 32, 32)
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    trained, held_out = ([1, 2, 3, 4, 5, 7], [0, 6])
    for examples, numbers in ((data.train, trained), (data.test, held_out)):
        found = examples.images[:, :, 0, 0].tolist()
        assert found == [[red, number, 0] for red in (0, 80) for number in numbers]


def test_image_folder_with_a_split_of_its_own(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "val", count=2)
    data = load_images(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (12, 4, 2)


def test_image_folder_without_pillow_says_what_to_install(tmp_path, monkeypatch):
    for name in ("ants", "bees"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.png").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        load_images(tmp_path)


def test_folders_and_files_of_no_known_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one sub-folder"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_images(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a file"):
        load_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"caf\xe9 ")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_text(tmp_path / "latin")


def test_a_text_of_the_users_own(tmp_path):
    (tmp_path / "mine.txt").write_text("abcab" * 20)
    data = load_text(tmp_path / "mine.txt")
    assert data.vocabulary == "abc"
    assert data.train[:5].tolist() == [0, 1, 2, 0, 1]
    assert (len(data.train), len(data.test)) == (90, 10)


@pytest.mark.parametrize("text", ["", "aaaa", "".join(map(chr, range(300)))])
def test_texts_without_a_usable_vocabulary_are_refused(text):
    with pytest.raises(ValueError, match="different characters"):
        texts.text_set(text, "this text")
