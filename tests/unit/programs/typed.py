"""What a user writes, for mypy --strict: pyproject.toml names it. ``type: ignore`` marks what must be an error."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from alto_distributed import ALTO, LAMB, E, adopt, param_groups, recipe


def main() -> None:
    model = nn.Linear(2, 2)
    params = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        ALTO(param_groups(model), **recipe(4096)),
        ALTO(params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, foreach=None),
        ALTO(model.named_parameters(), lr=torch.tensor(0.1)),
        LAMB(params, lr=0.1, betas=(0.9, 0.999), trust_clip=(0.0, 1.0)),
        E(torch.optim.SGD(params, lr=0.1), alpha=-5.0, beta1=0.99),
        E.of(torch.optim.AdamW)([nn.Parameter(torch.ones(2))], lr=0.1, alpha=-0.5, beta1=0.5),
    ]
    as_a_class: type[torch.optim.Optimizer] = E.of(torch.optim.AdamW)
    adapted: E = E.of(torch.optim.SGD)(params, 0.1, momentum=0.9)
    assert issubclass(as_a_class, E)
    for optimizer in [*optimizers, adapted]:
        schedule = StepLR(optimizer, 2)
        loss: float | None = optimizer.step()
        schedule.step()
        assert loss is None
    loss_of_closure: float = ALTO(params).step(lambda: 0.5)
    assert loss_of_closure == 0.5
    model(torch.ones(2)).sum().backward()
    lamb = LAMB(params)
    lamb.step()
    adopt(ALTO(params), lamb.state_dict(), model)


def refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    ALTO(params, weight_deca=0.1)  # type: ignore[call-arg]
    ALTO(params, lr="0.1")  # type: ignore[arg-type]
    LAMB(params, alpha=-5.0)  # type: ignore[call-arg]
    E(params, alpha=-5.0)  # type: ignore[arg-type]
    E.of(params)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
