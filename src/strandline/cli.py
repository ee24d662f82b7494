"""The command line: ``strandline serve | generate | chat | demo | eval | bench | explain | quantize``.

Flags are checked before torch is imported, which takes seconds.

Exit codes: 0 done, 1 the run failed or found a difference, 2 wrong usage or configuration, 130 Ctrl-C.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn

from strandline import __version__
from strandline.bench.replay_flags import add_explain_flags, add_replay_flags
from strandline.bench.serving.flags import add_report_flags, add_serve_flags
from strandline.config import (
    DTYPES,
    EngineConfig,
    flag,
)
from strandline.engine.flags import add_engine_flags, engine_options
from strandline.env import set_log
from strandline.errors import ConfigError, RequestError, StrandlineError
from strandline.foreign_flags import FOREIGN_FLAGS, value_hint
from strandline.server.flags import add_server_flags
from strandline.text_input import argument_text, open_standard_streams, read_stdin

MODEL_HELP = "a directory, a hub name, or 'demo' (default: %(default)s)"

QUANTIZED_FORMATS = ("fp8", "mxfp8", "nvfp4", "int4")
"""Formats that ``strandline quantize`` writes: those of ``models/storage/quantizers.py``."""

GENERATE_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 512

FIRST_WORD: Final = re.compile("--(enable|disable|no|max)-")
"""The beginning of flags that have little else in common."""

SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy"),
    ("top-p", float, "sample from the most likely tokens up to this cumulative probability"),
    ("top-k", int, "sample from this number of most likely tokens; 0: all"),
    ("min-p", float, "minimum probability of a token, relative to the most likely one"),
    ("repetition-penalty", float, "above 1 penalises tokens of the prompt and the output"),
    ("presence-penalty", float, "above 0 penalises tokens that have been generated"),
    ("frequency-penalty", float, "above 0 penalises tokens by how often they have been generated"),
    ("max-tokens", int, "maximum number of tokens to generate (default: {max_tokens})"),
    ("min-tokens", int, "minimum number of tokens to generate"),
)


class Parser(argparse.ArgumentParser):
    """A parser that rejects abbreviations and suggests the nearest flag in errors, which do not list all flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._reject(unknown[0], parsed)
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            name = next(iter(action.option_strings), "")
            error.message += value_hint(name, value, map(str, action.choices or ()))
            raise

    def _reject(self, name: str, parsed: argparse.Namespace) -> NoReturn:
        parser: argparse.ArgumentParser = getattr(parsed, "parser", self)
        flag = name.split("=")[0]
        whole, _, field = flag.partition(".")
        if whole in FOREIGN_FLAGS:
            parser.error(f"{whole}: {FOREIGN_FLAGS[whole]}")
        known = parser._option_string_actions
        if field and whole in known and known[whole].metavar == "JSON":
            parser.error(f"{flag}: fields are given together, as JSON: {whole} '{{\"{field}\": ...}}'")
        nearest = _nearest_flag(flag, list(known))
        parser.error(f"unknown argument {name}" + (f"; did you mean {nearest}?" if nearest else ""))


def _nearest_flag(name: str, known: Sequence[str]) -> str | None:
    """Return the flag that resembles an unknown one, also without a first word that many have; None: none does."""
    for nearest in get_close_matches(name, known, n=3, cutoff=0.7):
        if get_close_matches(FIRST_WORD.sub("", name), [FIRST_WORD.sub("", nearest)]):
            return nearest
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    open_standard_streams()
    try:
        parser = build_parser()
        if not given:
            parser.print_help(sys.stderr)
            return 2
        options = parser.parse_args(given)
        code: int = options.run(options)
    except StrandlineError as error:
        print(f"strandline: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return code


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="strandline", description="Inference for hybrid language models, with prefix caching.")
    parser.add_argument("--version", action="version", version=f"strandline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_demo(commands)
    _add_eval(commands)
    _add_bench(commands)
    _add_explain(commands)
    _add_quantize(commands)
    return parser


def _add_serve(commands: Any) -> None:
    text = "Serve a model over HTTP, with the OpenAI and Anthropic APIs."
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP", description=text, usage="strandline serve [MODEL] [options]"
    )
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help=MODEL_HELP)
    add_server_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=_run_serve, parser=parser)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue texts",
        description="Continue texts without the chat template.",
        usage="strandline generate [PROMPT ...] [options]",
    )
    text = "text to continue (default: read from stdin)"
    parser.add_argument("prompts", nargs="*", type=argument_text, metavar="PROMPT", help=text)
    parser.add_argument("--model", default="demo", help=MODEL_HELP)
    add_engine_flags(parser)
    _add_sampling_flags(parser, GENERATE_MAX_TOKENS)
    text = "stop at this text (may be repeated)"
    parser.add_argument("--stop", action="append", type=argument_text, metavar="TEXT", help=text)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="outputs per prompt (default: %(default)s)")
    parser.set_defaults(run=_run_generate, parser=parser)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model",
        description="Talk with a model; Ctrl-D ends.",
        usage="strandline chat [options]",
    )
    text = "system message that precedes the conversation"
    parser.add_argument("--system-prompt", type=argument_text, metavar="TEXT", help=text)
    parser.add_argument("--model", default="demo", help=MODEL_HELP)
    add_engine_flags(parser)
    _add_sampling_flags(parser, CHAT_MAX_TOKENS)
    parser.set_defaults(run=_run_chat, parser=parser)


def _add_demo(commands: Any) -> None:
    text = "Run a conversation and a shared-prefix workload with the cache off and on, side by side."
    parser = commands.add_parser("demo", help="demonstrate the prefix cache", description=text)
    parser.add_argument("--model", default="demo", help=MODEL_HELP)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.set_defaults(run=_run_demo, parser=parser)


def _add_eval(commands: Any) -> None:
    text = "Score a model on held-out recall and arithmetic, with the cache off and on."
    parser = commands.add_parser(
        "eval", help="score a model on tasks with known answers", description=text, usage="strandline eval [options]"
    )
    parser.add_argument("--per-kind", type=int, default=100, help="number of tasks of each kind (default: %(default)s)")
    parser.add_argument("--task-seed", type=int, default=0, help="seed of the tasks (default: %(default)s)")
    parser.add_argument("--model", default="demo", help=MODEL_HELP)
    add_engine_flags(parser)
    parser.set_defaults(run=_run_eval, parser=parser)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="run benchmarks", description="Benchmark a server, or simulate a cache.")
    text = "Replay recorded traffic through the real cache and scheduler, with a cost model instead of a device."
    kinds = bench.add_subparsers(metavar="WHAT", required=True, parser_class=Parser)
    parser = kinds.add_parser("replay", help="simulate the hits of a cache", description=text)
    add_replay_flags(parser)
    parser.set_defaults(run=_run_replay, parser=parser)
    text = "Benchmark a server with an OpenAI-compatible API; flags and results are those of vLLM's benchmark."
    parser = kinds.add_parser(
        "serve", help="benchmark a server", description=text, usage="strandline bench serve [options]"
    )
    add_serve_flags(parser)
    parser.set_defaults(run=_run_bench_serve, parser=parser)
    parser = kinds.add_parser(
        "report", help="compare runs of 'bench serve'", description="Draw charts of results on one page."
    )
    add_report_flags(parser)
    parser.set_defaults(run=_run_bench_report, parser=parser)


def _add_explain(commands: Any) -> None:
    text = "Show why a request missed, or what a prompt would hit, and how to improve it. The cache is not changed."
    parser = commands.add_parser("explain", help="explain cache misses", description=text)
    add_explain_flags(parser)
    parser.set_defaults(run=_run_explain, parser=parser)


def _add_quantize(commands: Any) -> None:
    text = "Write a model with its projections in a quantised format, in the layout of published models."
    parser = commands.add_parser("quantize", help="write a model with quantised weights", description=text)
    parser.add_argument("model", metavar="MODEL", help="a directory, a hub name, or 'demo'")
    add = parser.add_argument
    add("--output", metavar="DIR", required=True, help="a new directory")
    add("--format", default="fp8", choices=QUANTIZED_FORMATS, help="of the weights (default: fp8)")
    add(
        "--ignore",
        metavar="GLOB",
        action="append",
        default=[],
        help="modules that stay as they are, such as '*.self_attn.*'; may be repeated",
    )
    parser.set_defaults(run=_run_quantize, parser=parser)


def _add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling (default: from the model's generation_config.json)")
    for name, kind, text in SAMPLING_FLAGS:
        group.add_argument(f"--{name}", type=kind, help=text.format(max_tokens=max_tokens))


def _checked_engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options, with those checks done that do not need torch.

    Raises:
        ConfigError: a value is out of range, or there is no such model.
    """
    from strandline.text.model_files import check_files

    given = engine_options(options)
    check_files(EngineConfig(**given))
    return given


def _sampling_params(options: argparse.Namespace, **more: Any) -> Any:
    """Return the model's default sampling parameters, overridden by the flags.

    Raises:
        ConfigError: there is no such model, or a value is out of range.
    """
    from strandline.records.sampling_params import SamplingParams
    from strandline.text.model_files import default_sampling_params, find_model

    names = [name.replace("-", "_") for name, _, _ in SAMPLING_FLAGS]
    given = {**more, **{name: getattr(options, name) for name in names if getattr(options, name) is not None}}
    defaults = default_sampling_params(find_model(options.model))
    try:
        return SamplingParams(**{**defaults, **given})
    except RequestError as error:
        field, _, rest = str(error).partition(" ")
        raise ConfigError(f"{flag(field)} {rest}" if field in given else str(error)) from error


def _run_serve(options: argparse.Namespace) -> int:
    from strandline.server.config import ServerConfig
    from strandline.server.engine_configs import engine_configs
    from strandline.server.engines.spawned_engine import SpawnedEngine

    names = [field.name for field in fields(ServerConfig)]
    server: dict[str, Any] = {name: getattr(options, name) for name in names}
    configs = EngineConfig(**engine_options(options)), ServerConfig(**server)
    set_log(configs[1].log_format, configs[1].log_level)  # before there are engines, which inherit the environment
    with ExitStack() as stack:
        spawned = [stack.enter_context(SpawnedEngine(each.num_workers)) for each in engine_configs(configs[0])]
        from strandline.server.launch import serve  # takes seconds to import, as what engines import does

        return serve(*configs, spawned)


def _run_generate(options: argparse.Namespace) -> int:
    engine = _checked_engine_options(options)
    params = _sampling_params(options, n=options.n, stop=options.stop, max_tokens=GENERATE_MAX_TOKENS)
    prompts = options.prompts or [_read_prompt()]
    if not all(prompts):
        raise ConfigError("there is no prompt: pass one as an argument or on standard input")
    for prompt in options.prompts:
        if _is_model_directory(prompt):
            raise ConfigError(f"{prompt} is a directory with a model, not a prompt; name the model by --model {prompt}")
    from strandline import LLM

    llm = LLM(**engine)
    for output in llm.generate(prompts, params, use_tqdm=len(prompts) > 1):
        for completion in output.outputs:
            print(completion.text)
        _report(output)
    return 0


def _is_model_directory(text: str) -> bool:
    with suppress(OSError, ValueError):  # too long for a path, or no path at all
        return (Path(text) / "config.json").is_file()
    return False


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Type a prompt; Ctrl-D ends it.", file=sys.stderr)
    try:
        return read_stdin()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not text: {error}") from error


def _run_chat(options: argparse.Namespace) -> int:
    engine = _checked_engine_options(options)
    params = _sampling_params(options, max_tokens=CHAT_MAX_TOKENS)
    from strandline import LLM

    llm = LLM(**engine)
    messages = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if not text:
            return 0
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> str:
    shown = ""
    output = None
    for output in llm.stream(llm.render(messages), params):
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print(flush=True)
    if output is not None:
        _report(output)
    return shown


def _report(output: Any) -> None:
    """Print to stderr what the cache saved."""
    ttft_s = output.times.ttft_s or 0.0
    print(
        f"[{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from the cache; "
        f"first token after {ttft_s * 1000:.0f} ms]",
        file=sys.stderr,
    )


def _run_demo(options: argparse.Namespace) -> int:
    _checked_engine_options(options)
    from strandline.bench.demo_command import run_demo

    return run_demo(options.model, options.dtype)


def _run_replay(options: argparse.Namespace) -> int:
    from strandline.bench.replay_report import ReplayOptions, run_replay
    from strandline.bench.replay_setup import ReplaySetup

    wanted = ReplayOptions(
        traces=options.traces,
        memory=options.memory.split(","),
        policies=options.policy.split(","),
        setup=ReplaySetup.from_flags(options),
        plot=options.plot,
        num_replicas=options.replicas,
        routers=options.router.split(","),
    )
    return run_replay(wanted, as_json=options.json)


def _run_bench_serve(options: argparse.Namespace) -> int:
    from strandline.bench.serving.command import run_serving_benchmark

    return run_serving_benchmark(options)


def _run_bench_report(options: argparse.Namespace) -> int:
    from strandline.bench.serving.report import compare_files

    return compare_files(options.results, options.output, options.title, options.labels)


def _run_explain(options: argparse.Namespace) -> int:
    from strandline.bench.explain_command import run_explain

    return run_explain(options)


def _run_eval(options: argparse.Namespace) -> int:
    engine = _checked_engine_options(options)
    if options.per_kind < 1:
        raise ConfigError(f"--per-kind must be at least 1, got {options.per_kind}")
    from strandline.bench.exam import run_evaluation

    return run_evaluation(engine, per_kind=options.per_kind, seed=options.task_seed)


def _run_quantize(options: argparse.Namespace) -> int:
    from strandline.text.model_files import find_model

    source, output = find_model(options.model), Path(options.output)
    from strandline.models.storage.conversion import convert  # imports torch: there is a model

    print(convert(source, output, options.format, options.ignore, progress=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
