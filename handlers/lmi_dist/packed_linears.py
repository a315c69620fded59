"""The linears of a model of transformers, with weights in the form of our products."""

from collections.abc import Callable

from torch import Tensor, nn

from handlers.lmi_dist.placement import Weight


class PackedLinear(nn.Module):
    """A linear with a packed weight, as the module that transformers expects."""

    def __init__(self, linear: nn.Linear, pack: Callable[[Tensor], Weight]) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight = pack(linear.weight.detach())
        self._bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        y = self._weight(x.reshape(-1, self.in_features), self._bias)
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, pack: Callable[[Tensor], Weight]) -> None:
    """Put a PackedLinear in the place of each linear."""
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, PackedLinear(child, pack))
        else:
            pack_linears(child, pack)
