"""``strandline demo``: a conversation and a shared-prefix workload, with the cache off and on, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tqdm import tqdm

from strandline.bench.log_once import log_once
from strandline.bench.workloads import Report, report_of, stopwatch
from strandline.demo.facts import make_document
from strandline.engine.llm import LLM
from strandline.engine.loading import LOGGER
from strandline.records.outputs import RequestOutput
from strandline.records.sampling_params import SamplingParams

Message = dict[str, str]

DOCUMENT_TOKENS = 1500
NUM_QUESTIONS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass(frozen=True, slots=True)
class Script:
    """The demo's inputs: one conversation about a document, and independent questions about another."""

    document: str
    turns: tuple[str, ...]
    shared_document: str
    questions: tuple[str, ...]


def write_script(seed: int = 0) -> Script:
    """Draw the documents and the questions about them."""
    rng = Random(seed)
    document, facts = make_document(rng, DOCUMENT_TOKENS)
    about = [f"What is the {fact.attribute} of {fact.subject}?" for fact in facts]
    turns = (
        "Hello! My name is Ada.",
        about[0],
        "What is 17 + 25?",
        about[len(about) // 2],
        "What is my name?",
        about[-1],
    )
    shared_document, shared_facts = make_document(rng, DOCUMENT_TOKENS)
    questions = tuple(
        f"What is the {fact.attribute} of {fact.subject}?" for fact in rng.sample(shared_facts, NUM_QUESTIONS)
    )
    return Script(document, turns, shared_document, questions)


def run_demo(model: str, dtype: str) -> int:
    """Run the demo and print its table; return 0 if the cache changed no token, else 1."""
    script = write_script()
    rows: dict[str, list[Report]] = {"conversation": [], "shared prefix": []}
    dialogue: list[Message] = []
    steps = 2 * (len(script.turns) + len(script.questions))
    with log_once(LOGGER.name), tqdm(total=steps, desc="Running", disable=None, unit="request", leave=False) as bar:
        for is_on in (False, True):
            llm = LLM(model, dtype=dtype, enable_prefix_caching=is_on)
            report, dialogue = _converse(llm, script, bar)
            rows["conversation"].append(report)
            rows["shared prefix"].append(_ask_all(llm, script, bar))
    _print_dialogue(dialogue, script)
    print("\n" + "\n".join(table(rows)))
    return 0 if all(off.outputs == on.outputs for off, on in rows.values()) else 1


def table(rows: dict[str, list[Report]]) -> list[str]:
    """Return the lines of the table: per workload one row with the cache off and one with it on."""
    lines = [
        f"{'':<14} {'cache':<6}{'prompt tokens':>14}{'hit tokens':>18}{'first token':>13}{'tokens/s':>10}   same tokens"
    ]
    for name, (off, on) in rows.items():
        verdict = "yes" if off.outputs == on.outputs else "NO"
        for label, cache, report, same in ((name, "off", off, ""), ("", "on", on, verdict)):
            hit = f"{report.hit_tokens:,} ({report.hit_share:.1%})"
            lines.append(
                f"{label:<14} {cache:<6}{report.prompt_tokens:>14,}{hit:>18}{report.mean_ttft_s * 1000:>10,.0f} ms"
                f"{report.tokens_per_s:>10,.0f}   {same}"
            )
    return lines


def _converse(llm: LLM, script: Script, bar: "tqdm[Any]") -> tuple[Report, list[Message]]:
    """Hold the conversation; return the report and all messages."""
    messages: list[Message] = [{"role": "system", "content": script.document}]
    outputs: list[RequestOutput] = []
    with stopwatch() as elapsed:
        for turn in script.turns:
            messages.append({"role": "user", "content": turn})
            outputs += llm.chat(messages, GREEDY, use_tqdm=False)
            messages.append({"role": "assistant", "content": outputs[-1].outputs[0].text})
            bar.update()
    return report_of(outputs, elapsed()), messages


def _ask_all(llm: LLM, script: Script, bar: "tqdm[Any]") -> Report:
    """Ask each question in its own conversation, one after another."""
    outputs: list[RequestOutput] = []
    with stopwatch() as elapsed:
        for question in script.questions:
            messages = [{"role": "system", "content": script.shared_document}, {"role": "user", "content": question}]
            outputs += llm.chat(messages, GREEDY, use_tqdm=False)
            bar.update()
    return report_of(outputs, elapsed())


def _print_dialogue(messages: Sequence[Message], script: Script) -> None:
    print(f"A conversation about a document of {len(script.document.split()):,} words:\n")
    for message in messages[1:]:
        name = "you  " if message["role"] == "user" else "model"
        print(f"  {name}  {message['content']}")
