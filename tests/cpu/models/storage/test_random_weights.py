"""Random weights follow from published names: how layers are composed of parts does not change them."""

import torch
from torch import Tensor, nn

from strandline.models.layers.parts.targets import NamedTargets, interleaved, whole
from strandline.models.storage.random_weights import fill_with_random_weights, names_of_parameters


class Part(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8), requires_grad=False)


class Layer(nn.Module):
    """Two parameters, published as one tensor, in parts of any names and order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part() for name in sorted(names)})
        self.first, self.second = (self.parts[name] for name in names)

    def targets(self, names: frozenset[str]) -> NamedTargets:
        yield "up", interleaved(self.first.weight.view(2, 2, 8), self.second.weight.view(2, 2, 8))
        yield "down", whole(self.second.weight)


def drawn(layer: Layer) -> tuple[Tensor, Tensor]:
    fill_with_random_weights(layer, names_of_parameters(layer), 0, torch.float32)
    return layer.first.weight, layer.second.weight


def test_weights_do_not_depend_on_names_of_parts() -> None:
    first, second = drawn(Layer("a", "b"))
    for other in (Layer("b", "a"), Layer("x", "q")):
        assert all(map(torch.equal, (first, second), drawn(other)))


def test_parameters_of_one_published_tensor_differ() -> None:
    first, second = drawn(Layer("a", "b"))
    assert not torch.equal(first, second)
