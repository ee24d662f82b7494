"""By how much a model would have preferred other tokens to those of an answer."""

import torch

from strandline import LLM, SamplingParams

MAX_MEAN_REGRET = 0.03
MAX_REGRET = 1.5
"""In nats. Three times what activations in bfloat16, which round 2^15 times as coarsely, were seen to make."""


def regrets(judge: LLM, prompts: list[list[int]], found: list[list[int]], rank: int = 1) -> torch.Tensor:
    """Return by how much the likeliest token is likelier than each token of answers, given those before it.

    Args:
        rank: 2: the second likeliest token; one that is likelier than that has no regret.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=rank)
    texts = [prompt + answer for prompt, answer in zip(prompts, found, strict=True)]
    differences = []
    for prompt, text, output in zip(prompts, texts, judge.generate(texts, params, use_tqdm=False), strict=True):
        for index in range(len(prompt), len(text)):
            entries = (output.prompt_logprobs or [])[index] or {}
            ranked = sorted((entry.logprob for entry in entries.values()), reverse=True)
            differences.append(max(0.0, ranked[rank - 1] - entries[text[index]].logprob))
    return torch.tensor(differences)


def check_preferred(judge: LLM, prompts: list[list[int]], found: list[list[int]]) -> None:
    assert all(found)
    missed = regrets(judge, prompts, found)
    assert (float(missed.mean()) < MAX_MEAN_REGRET, float(missed.max()) < MAX_REGRET) == (True, True), missed
