"""A decoder of parts in any order: mixers and feed-forward parts need not come in pairs, nor positions be rotated."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, OutputGate, QueryKeyNorm
from strandline.models.layers.decoder import Decoder, DecoderLayer, pre_norm_layer
from strandline.models.layers.embedding import EmbeddingConfig
from strandline.models.layers.feed_forward.mlp import GatedMlp, GatedMlpConfig
from strandline.models.layers.parts.rotary import RotaryFrequencies, rotary_frequencies
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets
from strandline.models.layers.recurrences.gated_delta import GatedDeltaNet, GatedDeltaNetConfig
from strandline.models.layers.streams.residual import PreNorm, zero_centered
from strandline.specs import LayerSpec
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import VOCAB_SIZE, config_of, model_config, prompt

CONFIG = model_config(config_of("qwen3_5")).text
HIDDEN_SIZE = CONFIG.size("hidden_size")
SITE = Site(torch.float32, torch.device("cpu"))
NORM = zero_centered(1e-6)

layer = partial(pre_norm_layer, norm=NORM, hidden_size=HIDDEN_SIZE, site=SITE)


def no_names(names: frozenset[str]) -> NamedTargets:
    yield from ()


def make_model(layers: Sequence[DecoderLayer], rotary: RotaryFrequencies | None) -> CausalLM:
    embedding = EmbeddingConfig(VOCAB_SIZE, HIDDEN_SIZE, is_tied=False)
    decoder = Decoder(layers, PreNorm(NORM, HIDDEN_SIZE, SITE), embedding, rotary, SITE)
    return CausalLM(decoder, 512, no_names)


def parameters(model: CausalLM) -> Iterator[torch.Tensor]:
    """Yield the parameters in the order in which the model computes with them."""
    for each in model.decoder.layers:
        for part, norm in (("mixer", "mixer_norm_E"), ("mlp", "mlp_norm_E")):
            if getattr(each, part) is not None:
                yield from (getattr(each, norm), *getattr(each, part).parameters())
    assert model.decoder.embedding.head is not None
    yield from (model.decoder.embedding.embed_ZE, model.decoder.ends.norm_E, model.decoder.embedding.head.weight_OI)


def fill(model: CausalLM) -> None:
    """Draw the parameters, the same for models of the same parts in the same order."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters(model):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def gated_delta() -> GatedDeltaNet:
    return GatedDeltaNet(GatedDeltaNetConfig.read(CONFIG), SITE)


def attention() -> Attention:
    config = AttentionConfig.read(CONFIG, QueryKeyNorm.ZERO_CENTERED)
    return Attention(replace(config, gate=OutputGate.PER_CHANNEL), SITE)


def mlp() -> GatedMlp:
    return GatedMlp(GatedMlpConfig(HIDDEN_SIZE, 24), SITE)


def test_a_pair_equals_its_parts_as_two_layers() -> None:
    rotary = rotary_frequencies(CONFIG)
    paired = make_model([layer(gated_delta(), mlp()), layer(attention(), mlp())], rotary)
    apart = make_model(
        [layer(gated_delta(), None), layer(None, mlp()), layer(attention(), None), layer(None, mlp())], rotary
    )
    tokens, results = prompt(70), []
    for model in (paired, apart):
        fill(model)
        (logits,), _ = Driver(model).step([Part(Running(), tokens)])
        results.append(logits)
    assert torch.equal(*results)
    assert [each.spec for each in apart.decoder.layers][1::2] == [LayerSpec(), LayerSpec()]
    assert paired.spec.block_bytes == apart.spec.block_bytes
    assert paired.spec.slab_bytes == apart.spec.slab_bytes


def test_models_without_rotation_or_attention_resume_in_any_chunks() -> None:
    model = make_model([layer(None, mlp()), layer(gated_delta(), None), layer(gated_delta(), mlp())], None)
    fill(model)
    tokens = prompt(70)
    (whole,), _ = Driver(model).step([Part(Running(), tokens)])
    driver, running = Driver(model), Running()
    parts = [driver.step([Part(running, part)])[0][0] for part in (tokens[:13], tokens[13:69], tokens[69:])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)
