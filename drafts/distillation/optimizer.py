"""Muon for matrices, AdamW for the rest.

torch.optim.Muon orthogonalises in bfloat16, which CPUs without bfloat16 units run thirty times slower than fp32, and
one matrix at a time; this one stays in fp32 and batches matrices of one shape.
"""

import torch
from torch import Tensor, nn

#: Quintic Newton-Schulz coefficients of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Pushes the singular values of ``matrices [n, rows, columns]`` towards 1."""
    transposed = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if transposed else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


class MuonAdamW:
    """Steps every parameter of a model that requires a gradient; the state goes to and from a checkpoint with
    ``state_dict``.
    """

    def __init__(self, model: nn.Module, muon_lr: float = 0.02, adam_lr: float = 4e-3, momentum: float = 0.95) -> None:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        # Mamba's matrix of decays is no map from inputs to outputs.
        others = ("embed", "A_log")
        matrices = [
            p for n, p in trained if p.dim() == 2 and min(p.shape) > 8 and not any(other in n for other in others)
        ]
        chosen = {id(p) for p in matrices}
        self.groups: dict[str, list[nn.Parameter]] = {}
        for p in matrices:
            self.groups.setdefault("x".join(map(str, p.shape)), []).append(p)
        self.momenta = {k: torch.zeros(len(g), *g[0].shape) for k, g in self.groups.items()}
        rest = [p for _, p in trained if id(p) not in chosen]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.muon_lr, self.adam_lr, self.momentum = muon_lr, adam_lr, momentum

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Applies and clears the gradients, with both learning rates multiplied by ``scale``."""
        for name, parameters in self.groups.items():
            # An expert that no token went to has no gradient.
            gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            momentum = self.momenta[name].mul_(self.momentum).add_(gradients)
            update = orthogonalise(gradients.add(momentum, alpha=self.momentum))
            rows, columns = parameters[0].shape
            rate = self.muon_lr * scale
            for p, u in zip(parameters, update, strict=True):
                p.mul_(1 - rate * 0.02).add_(u, alpha=-rate * max(1.0, rows / columns) ** 0.5)
                p.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])
