"""The whole of ``blockskip select``: adapters, both probes, Eq. 2 for every ratio, the result and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockskip.errors import UserError
from blockskip.evaluation.encoder import Encoder
from blockskip.evaluation.encoders import open_encoder
from blockskip.method.attention import AttentionNotSeen
from blockskip.method.selection import Masked, masked_sets, single_blocks
from blockskip.precision import denormals_flushed
from blockskip.progress import say
from blockskip.selection import figures
from blockskip.selection.model import Model, open_for
from blockskip.selection.pictures import encoder_name, kept_names, picture_distances
from blockskip.selection.request import Request
from blockskip.selection.result import Sweep, document, write_document
from blockskip.selection.subjects import UNKNOWN, Tuned, given, subjects, trained
from blockskip.selection.table import Table
from blockskip.selection.validate import validate, validation_subjects
from blockskip.selection.velocity import SIGMAS, Velocities, velocity_distances


@denormals_flushed()
def select(request: Request, validated: float | None = None) -> dict[str, Any]:
    """Find the split of a model for every ratio; an interrupted selection goes on when called again.

    Args:
        validated: a ratio for which the chosen split and its neighbours are trained and compared (``validate``).

    Returns:
        The result, as ``request.output`` has it.

    Raises:
        UserError: something that was given cannot be used; nothing was loaded.
        RunError: the model's attention cannot be reached, a training cannot go on, or a value is not finite.
    """
    model = open_for(request)
    counts = request.skipped(model.num_blocks)
    sets = masked_sets(model.num_blocks, max(counts.values()), request.width_of_window(model.num_blocks))
    encoder = open_encoder(request.encoder, model.device) if "pictures" in request.probes else None
    table = Table(request.folder / "distances.jsonl")
    if request.loras:
        tuned = given(request)
        for one in tuned:
            model.adapters(one.adapter)
        _check_pictures(request, tuned)
        taken = [one.subject for one in tuned]
    else:
        taken = subjects(request)
    others = validation_subjects(request, taken) if validated is not None else []
    _check_place(request)
    if not request.loras:
        tuned = trained(model, taken)
    sweeps: dict[str, Sweep] = {}
    velocities = None
    try:
        for probe in request.probes:
            if probe == "pictures":
                assert encoder is not None
                values = picture_distances(model, tuned, sets, encoder, table, request.folder / "pictures")
                sweeps[probe] = Sweep.of(sets, values)
            else:
                everything = [*sets, *single_blocks(model.num_blocks)]
                velocities = velocity_distances(model, tuned, everything, table)
                sweeps[probe] = Sweep.of(everything, velocities.by_picture())
    except AttentionNotSeen as error:
        raise UserError(f"The text cannot be hidden from this model: {error}.") from None
    name = encoder_name(encoder) if encoder is not None else "none"
    found = document(model, tuned, name, counts, sweeps, velocities)
    write_document(request.output, found)
    _draw(model, tuned, sets, encoder, sweeps, velocities, found)
    if validated is not None:
        found["validation"] = validate(model, validated, found, others)
        write_document(request.output, found)
    return found


def _check_place(request: Request) -> None:
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f'--output "{request.output}" cannot be written ({error.strerror}); give another place.'
        ) from None


def _check_pictures(request: Request, tuned: Sequence[Tuned]) -> None:
    lacking = [one.subject.name for one in tuned if one.subject.images is None]
    if "velocity" in request.probes and lacking:
        raise UserError(
            f"The probe of velocity needs the pictures of {', '.join(lacking)}, which {UNKNOWN}; put them back, or "
            "give --probe pictures."
        )


def _draw(
    model: Model,
    tuned: Sequence[Tuned],
    sets: Sequence[Masked],
    encoder: Encoder | None,
    sweeps: dict[str, Sweep],
    velocities: Velocities | None,
    found: dict[str, Any],
) -> None:
    """Figures of this result alone: those that it does not have are taken away, since they would be another one's."""
    folder = model.request.folder
    chosen = {entry["ratio"]: (entry["front"], entry["tail"]) for entry in found["splits"]}
    figures.curves(folder / "curves.png", sweeps, chosen, model.num_blocks)
    if velocities is not None:
        single = velocities.distances.mean((0, 1))[:, -model.num_blocks :]
        attention, to = velocities.attention.mean((0, 1)), found["attention"]["to"]
        figures.heat_map(folder / "heatmap.png", single, attention, to, SIGMAS)
    else:
        (folder / "heatmap.png").unlink(missing_ok=True)
    names = [] if encoder is None else kept_names(model, tuned, sets, encoder)
    if not figures.contact_sheet(folder / "contact.png", folder / "pictures", names, sets):
        (folder / "contact.png").unlink(missing_ok=True)
    say(f"Figures: {folder}")


def table_text(found: dict[str, Any]) -> str:
    """The chosen splits as lines of text."""
    lines = [f"{'ratio':>6}  {'skipped':>7}  {'front':>5}  {'tail':>4}  chosen in   the paper's shares   other probes"]
    for entry in found["splits"]:
        own = f"{entry['front']}, {entry['tail']}"
        other = "; ".join(f"{name} ({pair[0]}, {pair[1]})" for name, pair in entry["other_probes"].items())
        shares = entry["paper_shares"]
        lines.append(
            f"{entry['ratio']:>6.0%}  {entry['skipped']:>7}  {entry['front']:>5}  {entry['tail']:>4}  "
            f"{entry['chosen_in'].get(own, 0):>9.0%}   ({shares[0]}, {shares[1]})".ljust(62)
            + f"   {other}"
        )
    for name, values in found["agreement"].items():
        lines.append(f"rank correlation of {name} with {found['probe']}: {_correlations(values)}")
    for name, values in found["attention"].get("agreement", {}).items():
        to = found["attention"]["to"]
        lines.append(f"rank correlation of attention to {to} with {name}: {_correlations(values)}")
    return "\n".join(lines)


def _correlations(values: dict[str, float | None]) -> str:
    shown = ((kind, "none (all are equal)" if value is None else f"{value:.2f}") for kind, value in values.items())
    return ", ".join(f"{kind} {value}" for kind, value in shown)


def validation_text(found: dict[str, Any]) -> str:
    """What training with the chosen split and its neighbours gave, as lines of text."""
    lines = [
        f"Trained at {found['ratio']:.0%} on {', '.join(found['subjects'])}:",
        f"{'front':>5}  {'tail':>4}  {'held-out loss, from the base':>28}  {'subject fidelity':>16}",
    ]
    for row in (*found["splits"], {"front": "plain", "tail": "LoRA", **found["plain"]}):
        pair = [row["front"], row["tail"]]
        marks = [
            text for text, which in (("chosen", "chosen"), ("best", "best_by_heldout_loss")) if found[which] == pair
        ]
        change, fidelity = row["mean_heldout_change"], row["mean_fidelity"]
        lines.append(f"{pair[0]:>5}  {pair[1]:>4}  {change:>+28.1%}  {fidelity:>16.3f}  {', '.join(marks)}".rstrip())
    return "\n".join(lines)
