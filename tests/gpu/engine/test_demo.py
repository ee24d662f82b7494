"""The bundled model on a GPU: it answers its held-out tasks, and the cache changes no word."""

import pytest

from strandline import LLM
from strandline.bench.evaluate import make_suite
from strandline.bench.exam import MODES, Result, take, token_counter
from strandline.demo.tasks import KINDS, Task

PER_KIND = 100

Exam = tuple[list[Task], dict[str, Result]]


@pytest.fixture(scope="module")
def exam() -> Exam:
    suite: list[Task] = []
    results = {}
    for mode in MODES:
        llm = LLM("demo", dtype="float32", device="cuda", memory="4GiB", enable_prefix_caching=mode != "off")
        suite = suite or make_suite(0, PER_KIND, count=token_counter(llm))
        results[mode] = take(llm, suite, mode)
    return suite, results


@pytest.mark.parametrize("mode", MODES)
def test_the_demo_model_answers_every_task(exam: Exam, mode: str) -> None:
    suite, results = exam
    assert {kind: results[mode].correct(suite, kind) for kind in KINDS} == dict.fromkeys(KINDS, PER_KIND)


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_cache_changes_no_word(exam: Exam, mode: str) -> None:
    _, results = exam
    assert results[mode].replies == results["off"].replies
    assert results[mode].hit_share > results["off"].hit_share
