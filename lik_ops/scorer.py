"""`MaxSimScorer`: MaxSim as a module, for code that composes modules."""

from torch import Tensor, nn

from .api.score import maxsim
from .arguments import Backward, check_options


class MaxSimScorer(nn.Module):
    """A stateless module around `lik_ops.maxsim`: no parameters, no buffers, picklable.

    Args:
        normalize: L2-normalise every token first.
        backward: ``"auto"``, ``"lowmem"`` or ``"unified"``.
        recompute: find the winners again in the backward instead of keeping them.

    Raises:
        TypeError, ValueError: `backward` is none of these, or the others are no bools.

    Example:
        >>> scorer = lik_ops.MaxSimScorer(normalize=True)
        >>> scorer(torch.randn(2, 32, 128), torch.randn(5, 300, 128)).shape
        torch.Size([2, 5])
    """

    def __init__(self, *, normalize: bool = False, backward: Backward = "auto", recompute: bool = False) -> None:
        super().__init__()
        check_options("MaxSimScorer", normalize, backward, recompute)
        self.normalize = normalize
        self.backward = backward
        self.recompute = recompute

    def forward(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None = None,
        d_mask: Tensor | None = None,
        q_weight: Tensor | None = None,
    ) -> Tensor:
        """The scores of `lik_ops.maxsim` for these arguments."""
        return maxsim(
            Q,
            D,
            q_mask,
            d_mask,
            q_weight=q_weight,
            normalize=self.normalize,
            backward=self.backward,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}, backward={self.backward!r}, recompute={self.recompute}"
