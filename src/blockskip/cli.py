"""The command ``blockskip``: verbs that parse, call and print."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from blockskip import __version__
from blockskip.errors import OutOfMemory, RunError, UserError
from blockskip.options import add_settings, given_values, joined_sizes
from blockskip.settings import from_flat

#: Settings of which ``plan --table`` takes several values.
SEVERAL = ("model.path", "memory.device")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists what can be given.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 the run cannot go on, 2 bad input, 3 out of memory.

    Where nobody reads on what is printed (``| head -1``), the code is that of a program which the system ends for it.
    """
    try:
        try:
            return _told(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print goes nowhere
        return 128 + 13


def _told(arguments: Sequence[str] | None) -> int:
    """Run one command, with what goes wrong told in sentences."""
    _quiet_libraries()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")  # of its own code
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        for problem in error.problems:
            print(f"blockskip: {problem}", file=sys.stderr)
        return error.exit_code
    except RunError as error:
        print(f"blockskip: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nblockskip: stopped; the same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError, OSError) as error:
        from blockskip.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
        print(
            f"blockskip: Out of memory outside the phases of a run ({reason}); what was written is whole. "
            "Close other programs that take memory, or take a smaller model or smaller pictures.",
            file=sys.stderr,
        )
        return OutOfMemory.exit_code


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="blockskip", description="Personalise a diffusion transformer from a few pictures "
                     "on a small machine (DiT-BlockSkip).", allow_abbrev=False)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"blockskip {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True, parser_class=_Parser)
    _add_train(verbs)
    _add_plan(verbs)
    _add_generate(verbs)
    _add_families(verbs)
    _add_job(verbs, "select", "find out which blocks of a model can be skipped")
    _add_job(verbs, "benchmark", "compare the method with plain LoRA and with its own parts")
    _add_job(verbs, "demo", "personalise the built-in model with a subject it has never seen")
    arguments, problems = joined_sizes(arguments)
    if problems:
        raise UserError(problems)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [text.partition("=")[0] for text in unknown if text.startswith("-")] or unknown[:1]
        options = [option for action in verbs.choices[known.verb]._actions for option in action.option_strings]
        raise UserError(_unknown_option(name, known.verb, options) for name in names)
    code: int = known.call(known)
    return code


def _unknown_option(name: str, verb: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), options, 1, 0.5)
    hint = f'; did you mean "{near[0]}"' if near else f"; `blockskip {verb} --help` lists what can be given"
    return f'"{name}" is not an option of `blockskip {verb}`{hint}.'


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train", help="personalise a model with your pictures", allow_abbrev=False,
        description="Personalise a model. An interrupted run continues with the same command. Settings come from "
        "--preset, then from --config, then from the options here; every key of the file is an option.",
        usage="blockskip train [--preset NAME] [--config FILE] [--model M] [--images FOLDER] [--prompt TEXT]\n"
        "           [--output FOLDER] ...",
    )  # fmt: skip
    parser.set_defaults(call=_train)
    add_settings(parser)


def _add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan", help="tell memory, disk and work of a run before it", allow_abbrev=False,
        description="Tell what `blockskip train` would take with the same settings: memory of the device and of the "
        "host, disk and work of each phase. Needs no weights, GPU, pictures or output folder; --model may also be a "
        "transformer's config.json. The plan is for this machine's accelerator, without one for CUDA, or for --device.",
        usage="blockskip plan [--preset NAME] [--config FILE] [--model M] [--memory SIZE] [--compare | --table] "
        "[--json] ...",
    )  # fmt: skip
    parser.set_defaults(call=_plan)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--table",
        action="store_true",
        help="what fits on cards of 4 to 24 GB: every built-in model, or those of --model, on every card, or those of "
        "--memory, which is then the whole card's",
    )
    parser.add_argument("--markdown", action="store_true", help="with --table: as Markdown")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="beside plain LoRA and the paper's ratios of 30, 40 and 50%%",
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="with --compare: draw it (.png, .svg or .pdf)")
    parser.add_argument(
        "--measure", action="store_true", help="time single blocks on this machine, and estimate seconds from them"
    )
    add_settings(parser, several=SEVERAL)


def _add_generate(verbs: Any) -> None:
    parser = verbs.add_parser("generate", help="draw pictures with a LoRA", allow_abbrev=False,
                              description="Draw pictures with the unchanged model and a LoRA.")  # fmt: skip
    parser.set_defaults(call=_generate)
    parser.add_argument("--prompt", nargs="+", required=True, help="one prompt or several")
    parser.add_argument("--lora", type=Path, help="a run's output folder, or a LoRA file; without it the base draws")
    parser.add_argument("--model", help='default: the base of the run, else "builtin"; see blockskip train --help')
    parser.add_argument(
        "--model.transformer", dest="transformer", metavar="FILE",
        help="take the transformer's weights from a file; default: with the base of the run, its own",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("generated"), help="folder for the PNGs (default: generated)"
    )
    parser.add_argument("--images", type=int, default=1, help="pictures of each prompt (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="noise seed of the first picture (default: 0)")
    parser.add_argument("--height", type=int, help="pixels; default: the model's")
    parser.add_argument("--width", type=int, help="pixels; default: the model's")
    parser.add_argument("--num-inference-steps", type=int, help="sampler steps; default: the model's")
    parser.add_argument("--guidance-scale", type=float, help="default: the model's")
    parser.add_argument("--lora-scale", type=float, default=1.0, help="strength of the LoRA (default: 1)")
    parser.add_argument("--stream", action="store_true", help="load one block, and one text encoder layer, at a time")
    parser.add_argument(
        "--batch-size", type=int, default=1, help="pictures that go through the transformer together (default: 1)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--dtype", default="auto", help="auto (that of the run), float32, bfloat16, float16")


def _add_families(verbs: Any) -> None:
    parser = verbs.add_parser("families", help="list the models that can be personalised", allow_abbrev=False,
                              description="List the architectures, their published models and sizes.")  # fmt: skip
    parser.set_defaults(call=_families)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _add_job(verbs: Any, verb: str, help: str) -> None:
    """A job of many runs, whose options are a module of its own."""
    from blockskip.benchmark import command as benchmark
    from blockskip.benchmark import demo_command as demo
    from blockskip.selection import command as select

    command: Any = {"select": select, "benchmark": benchmark, "demo": demo}[verb]
    parser = verbs.add_parser(verb, help=help, allow_abbrev=False, description=command.DESCRIPTION)
    parser.set_defaults(call=command.call)
    command.add_options(parser)


def _train(given: argparse.Namespace) -> int:
    values, origins = given_values(given)
    from_flat(values)  # wrong settings are told before the libraries are imported
    from blockskip.run import adapter_kind, configured, train

    result = train(configured(values, origins=origins))
    print(f"{adapter_kind(result.adapter)}: {result.adapter}\nReport: {result.output / 'report.html'}")
    return 0


def _plan(given: argparse.Namespace) -> int:
    if given.chart is not None and not given.compare:
        raise UserError("--chart draws the comparison; give --compare as well.")
    values, origins = given_values(given)
    lists = {name: text if isinstance(text := values.pop(name, []), list) else [text] for name in SEVERAL}
    if given.table:
        return _table(given, values, lists)
    if given.markdown:
        raise UserError("--markdown is how --table can be printed; give --table as well.")
    for name, texts in lists.items():
        if len(texts) > 1:
            raise UserError(f"{name} has {len(texts)} values, {', '.join(texts)}; only --table takes more than one.")
        if texts:
            values[name] = texts[0]
    from_flat(values)
    from blockskip.planner import command
    from blockskip.run import configured

    config = configured(values, planned=True, origins=origins)
    print(command.plan(config, compare=given.compare, chart=given.chart, measure=given.measure, as_json=given.json))
    return 0


def _table(given: argparse.Namespace, values: dict[str, Any], lists: dict[str, list[str]]) -> int:
    for name in ("compare", "measure"):
        if getattr(given, name):
            raise UserError(f"--{name} is of one plan and --table of many; give one of the two.")
    if given.markdown and given.json:
        raise UserError("--table is printed as Markdown or as JSON; give one of --markdown and --json.")
    if str(values.pop("train.device", "auto")).partition(":")[0] not in ("auto", "cuda"):
        raise UserError("train.device: --table is of CUDA cards; leave out --device.")
    from blockskip.planner import command

    models, cards = lists["model.path"], lists["memory.device"]
    print(command.table(values, models, cards, as_json=given.json, markdown=given.markdown))
    return 0


def _families(given: argparse.Namespace) -> int:
    from blockskip.planner.supported import families

    print(families(as_json=given.json))
    return 0


def _generate(given: argparse.Namespace) -> int:
    from blockskip.run import generate

    for name in ("images", "height", "width", "num_inference_steps", "batch_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
    pictures = generate(
        given.prompt, given.lora, model=given.model, transformer=given.transformer, images=given.images,
        seed=given.seed, height=given.height, width=given.width, num_inference_steps=given.num_inference_steps,
        guidance_scale=given.guidance_scale, lora_scale=given.lora_scale, stream=given.stream,
        batch_size=given.batch_size, device=given.device, dtype=given.dtype,
    )  # fmt: skip
    given.output.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, given.images)
        path = given.output / f"{row:02d}-seed{given.seed + column}.png"
        picture.save(path)
        print(path)
    return 0


def _show_warning(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> None:
    """Our own warnings as a sentence; those of libraries with their place, as Python shows them."""
    ours = category is UserWarning and Path(file).is_relative_to(Path(__file__).parent)
    text = f"blockskip: {message}\n" if ours else warnings.formatwarning(message, category, file, line)
    sys.stderr.write(text)


def _quiet_libraries() -> None:
    """Keep the libraries' own notices out of the terminal; errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
