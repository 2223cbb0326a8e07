"""Results that belong to what was asked for: nothing of another sampler, setting, folder or an earlier process."""

import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import blockskip.selection.pictures as pictures_module
import blockskip.selection.velocity as velocity_module
from blockskip.errors import RunError, UserError
from blockskip.loading.selected import selected_split
from blockskip.method.selection import masked_sets
from blockskip.method.split import Split
from blockskip.presets import split_for, unmeasured
from blockskip.progress import progress
from blockskip.selection import table as table_module
from blockskip.selection.job import select, table_text
from blockskip.selection.model import open_for
from blockskip.selection.request import Request
from blockskip.selection.result import Sweep, agreement, document, write_document
from blockskip.selection.subjects import given
from blockskip.selection.table import Table
from blockskip.settings import from_flat
from tests.adapters.test_frozen import make_lora
from tests.selection.short import with_short_texts
from tests.selection.small import Pixels, request

LEVELS = (0.3, 0.7)


@pytest.fixture(autouse=True)
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("job", "result", "velocity"):
        monkeypatch.setattr(f"blockskip.selection.{module}.SIGMAS", LEVELS)


@pytest.fixture
def asked(flux_folder: Path, subjects: tuple[str, str], tmp_path: Path) -> Request:
    """Of one adapter with known pictures, both probes and as few pictures as there can be."""
    source = with_short_texts(flux_folder, tmp_path / "model")
    run = tmp_path / "run"
    make_lora(source, run / "adapter", range(8))
    about = f'[data]\nimages = "{Path(subjects[0]).as_posix()}"\nprompt = "a photo of sks dog"\n'
    (run / "config.toml").write_text(about, encoding="utf-8")
    return request(
        source.folder, tmp_path, (), loras=(str(run),), prompts=("{}", "a cat"), ratios=(0.25,), window=0,
        images_per_prompt=1,
    )  # fmt: skip


class Counted:
    """How often something was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.calls, function = 0, getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    def since(self) -> int:
        """Calls since this was asked last."""
        calls, self.calls = self.calls, 0
        return calls


def change(file: Path, **values: Any) -> None:
    """Other values in a JSON file."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | values), encoding="utf-8")


def rename_a_token(folder: Path) -> None:
    """Change a tokenizer's file by something that moves no id of ours."""
    file = next(path for path in sorted(folder.iterdir()) if path.name == "tokenizer_config.json")
    change(file, clean_up_tokenization_spaces=True, note="other")


def test_what_the_pictures_depend_on_is_drawn_anew_and_told_apart(
    asked: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler and the call move pictures alone, tokenizers and the text length the velocity too."""
    drawn, probed = (Counted(monkeypatch, *what) for what in
                     ((pictures_module, "draw"), (velocity_module, "fixed_samples")))  # fmt: skip
    model = Path(asked.model)
    before = select(asked)
    assert (drawn.since(), probed.since()) == (2, 1)
    call = {"max_sequence_length": 40}
    for edit, counts, what in (
        (functools.partial(change, model / "scheduler" / "scheduler_config.json", shift=9.0), (2, 0), "scheduler"),
        (functools.partial(rename_a_token, model / "tokenizer"), (2, 1), "tokenizers"),
        (functools.partial(change, model / "builtin.json", call=call | {"true_cfg_scale": 3.0}), (2, 0), "guidance"),
        (functools.partial(change, model / "builtin.json", call={
            "max_sequence_length": 40, "true_cfg_scale": 3.0, "negative_prompt": "blurred"}), (2, 0),
         "negative_prompt"),
        (functools.partial(change, model / "builtin.json", call={"max_sequence_length": 44}), (2, 1), "text_length"),
    ):  # fmt: skip
        edit()
        after = select(asked)
        assert (drawn.since(), probed.since()) == counts, what
        assert after["made_with"][what] != before["made_with"][what]
        before = after
    assert select(asked) == before
    assert (drawn.since(), probed.since()) == (0, 0)


def test_another_noise_schedule_gives_other_distances(asked: Request) -> None:
    """And not those of the first, from the same folder."""
    one = select(replace(asked, probes=("pictures",)))
    change(Path(asked.model) / "scheduler" / "scheduler_config.json", shift=9.0)
    other = select(replace(asked, probes=("pictures",)))
    assert one["distances"] != other["distances"] and one["made_with"] != other["made_with"]


def test_a_contact_sheet_shows_the_pictures_of_its_own_setting(asked: Request) -> None:
    asked = replace(asked, probes=("pictures",))
    sheet = asked.folder / "contact.png"

    def shown(wanted: Request) -> np.ndarray[Any, Any]:
        select(wanted)
        with Image.open(sheet) as picture:
            return np.asarray(picture.convert("RGB"))

    first = shown(asked)
    other = shown(replace(asked, prompts=("a bowl",), seed=7))
    assert first.shape == other.shape and (first != other).any()
    assert (shown(asked) == first).all()
    assert (shown(replace(asked, prompts=("a bowl",), seed=7)) == other).all()


def test_figures_that_a_result_does_not_have_are_not_left_from_another(asked: Request) -> None:
    select(asked)
    names = {"contact.png", "heatmap.png", "curves.png"}
    assert names <= {path.name for path in asked.folder.iterdir()}
    select(replace(asked, probes=("velocity",)))
    assert names & {path.name for path in asked.folder.iterdir()} == {"heatmap.png", "curves.png"}
    select(replace(asked, probes=("pictures",)))
    assert names & {path.name for path in asked.folder.iterdir()} == {"contact.png", "curves.png"}


def test_what_an_earlier_process_did_is_not_its_own_speed(asked: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int, int, int]] = []

    @contextmanager
    def seen(total: int, what: str, start: int = 0) -> Iterator[Any]:
        with progress(total, what, start) as bar:
            yield bar
            begun.append((what, start, bar.done, total))

    for module in (pictures_module, velocity_module):
        monkeypatch.setattr(module, "progress", seen)
    select(asked)
    assert begun == [("masked pictures", 0, 2, 2), ("masked velocities", 0, 2, 2)]
    select(replace(asked, prompts=("{}", "a cat", "a bowl", "a bowl")))
    assert begun[2:] == [("masked pictures", 2, 4, 4), ("masked velocities", 2, 2, 2)]


def test_a_built_in_model_was_measured_at_other_ratios() -> None:
    for family, blocks in (("flux", (4, 8)), ("sana", (12,))):
        for ratio in (0.3, 0.4):
            split, source = split_for(family, blocks, ratio)
            sentence = unmeasured(split, family, blocks)
            assert source is None and "Nobody" not in sentence
            for part in (f"first {split.front} and the last {split.tail}", "scaled", "this ratio", "trained",
                         "docs/selection.md", "`blockskip select`"):  # fmt: skip
                assert part in sentence
    assert "Nobody has measured" in unmeasured(Split(3, 1), "flux", (3, 5))


def test_the_folder_of_a_run_s_pictures_is_written_whole(
    flux_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockskip.run import prepare

    shutil.copytree(photos, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    prepared = prepare(from_flat({
        "model.path": str(flux_folder), "data.images": "photos", "data.prompt": "a dog", "output": "out",
        "data.class_images": "photos", "data.class_prompt": "a dog",
    }))  # fmt: skip
    assert prepared.config.data.images == prepared.config.data.class_images == str(Path.cwd() / "photos")


def test_relative_pictures_of_an_older_run_are_those_beside_it(
    asked: Request, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the selection is started, and never those of a folder that is only called the same."""
    then, now = tmp_path / "then", tmp_path / "now"
    for folder in (then, now):
        folder.mkdir()
        shutil.copytree(photos, folder / "photos")
    shutil.copytree(asked.loras[0], then / "runs" / "dog")
    run, wanted = then / "runs" / "dog", replace(asked, loras=("../then/runs/dog",))

    def found(output: str) -> Path | None:
        text = f'output = "{output}"\n[data]\nimages = "photos"\nprompt = "a photo of sks dog"\n'
        (run / "config.toml").write_text(text, encoding="utf-8")
        return given(wanted)[0].subject.images

    monkeypatch.chdir(now)
    images = found("runs/dog")
    assert images is not None and images.resolve() == (then / "photos").resolve()
    assert found(run.as_posix()) is None
    assert found("other/dog") is None
    assert found("../runs/dog") is None
    with pytest.raises(
        UserError, match=r"are not where data\.images in the config\.toml of its run says, .*put them back"
    ):
        select(wanted)


def test_a_torn_line_is_taken_out_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the one way in which files are replaced here, flushed and under a name of its own."""
    path, calls = tmp_path / "distances.jsonl", []
    Table(path).add("a", [1.0])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key"')
    write = table_module.write_atomically
    monkeypatch.setattr(table_module, "write_atomically", lambda *what: (calls.append(what[0]), write(*what)))
    Table(path)
    assert calls == [path] and path.read_bytes() == whole
    Table(path)
    assert calls == [path]


def test_no_order_is_null(flux_folder: Path, tmp_path: Path) -> None:
    """Where all sets of a kind do the same, there is nothing to compare; JSON has no word for what is no number."""
    sets = masked_sets(8, 2, 2)
    values = np.random.default_rng(0).uniform(0.1, 1, size=(1, 2, len(sets)))
    flat, some = Sweep.of(sets, np.ones_like(values)), Sweep.of(sets, values)
    assert set(agreement(some, flat, []).values()) == {None}
    assert None not in agreement(some, some, [2]).values()
    model = open_for(request(flux_folder, tmp_path, ()))
    found = document(model, [], "pixels", {0.25: 2}, {"pictures": some, "velocity": flat}, None)
    write_document(tmp_path / "selection.json", found)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    written = json.loads((tmp_path / "selection.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert written == found and written["agreement"]["velocity"]["front"] is None
    assert "front none (all are equal)" in table_text(found)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document(tmp_path / "other.json", {"value": float("nan")})
    assert not (tmp_path / "other.json").exists()


class Broken(Pixels):
    """An encoder with a value that is no number."""

    def embed(self, images: list[Image.Image] | torch.Tensor) -> torch.Tensor:
        found = super().embed(images)
        found[-1, 0] = float("nan")
        return found


def test_what_is_not_finite_is_told_and_not_kept(asked: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("blockskip.selection.job.open_encoder", lambda name, device: Broken())
        with pytest.raises(RunError, match=r"encoder pixels gave values .* not finite .*; give another --encoder"):
            select(asked)
    assert not (asked.folder / "distances.jsonl").exists()
    for name in ("changes", "attention"):
        with monkeypatch.context() as broken:
            broken.setattr(velocity_module._Probe, name, lambda *_: [[[float("nan")]]])
            with pytest.raises(RunError, match=r"not finite in torch\.float32 .*; give another --dtype"):
                select(replace(asked, probes=("velocity",)))
    assert np.isfinite(select(asked)["splits"][0]["chosen_in"].popitem()[1])


def test_adapters_of_another_base_are_refused(asked: Request, tmp_path: Path) -> None:
    """What a run was trained over or on is not in the model that would be looked into."""
    config = Path(asked.loras[0]) / "config.toml"
    plain = config.read_text(encoding="utf-8")
    config.write_text(plain + '[model]\nbase_adapters = ["other"]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"was trained over model\.base_adapters, which a selection does not load"):
        given(asked)
    file = tmp_path / "flux.safetensors"
    config.write_text(plain + f'[model]\ntransformer = "{file.as_posix()}"\n', encoding="utf-8")
    for transformer in (None, "other.safetensors"):
        with pytest.raises(UserError, match=r"was trained on the transformer of .*; give it as --model\.transformer"):
            given(replace(asked, transformer=transformer))
    assert len(given(replace(asked, transformer=str(file)))) == 1


@pytest.mark.parametrize(
    "name", ["model.path", "model.base_adapters", "data.images", "train.lisa_blocks", "skip.middle"]
)
def test_settings_that_would_be_of_another_model_or_training_are_refused(asked: Request, name: str) -> None:
    (sentence,) = replace(asked, training={name: "x"}).check()
    assert sentence.startswith(f"{name} cannot be set here: ") and sentence.endswith(".")
    assert asked.check() == []


def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(asked: Request, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=r'--output ".*folder\.json" is a folder; give the file to write'):
        select(replace(asked, output=tmp_path / "folder.json"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r'--output ".*x\.json" cannot be written \(.*\); give another place'):
        select(replace(asked, output=tmp_path / "file" / "x.json"))


def test_numbers_of_another_shape_in_a_table_are_measured_again(asked: Request) -> None:
    """As a file has them that somebody edited, or that a disk damaged."""
    before, table = select(asked), asked.folder / "distances.jsonl"
    lines = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    for wrong in ([[0.0]], "abc", 5, {}, None, [[float("nan")]]):
        table.write_text("".join(json.dumps(line | {"value": wrong}) + "\n" for line in lines), encoding="utf-8")
        assert select(asked) == before


def test_a_damaged_result_is_one_sentence(tmp_path: Path) -> None:
    for content in ('{"format": 1, "family": "flux", "blocks": [Infinity, 8], "distances": {}}', "[" * 100_000):
        (tmp_path / "selection.json").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="is no result of `blockskip select`, or is damaged"):
            selected_split(str(tmp_path), "flux", (4, 8), 0.5)
