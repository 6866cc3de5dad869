"""How large the parameters are that one rank holds: of a GPT-2 with a run's settings, or of a model known by its size.

Engines pad and cut parameter by parameter and group by group, so a list for each of the two parameter groups (decayed,
and the vectors that are not) says more than the sum.
"""

from __future__ import annotations

from ..config.settings import Model

#: Elements of each parameter, in the model's order, for each parameter group.
Groups = tuple[tuple[int, ...], ...]


def of_model(model: Model, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> Groups:
    """The parameters of the fullest rank: with a pipeline the first, which has the embeddings.

    (The last stage has a copy of the token embedding, for the output, and no positions.)
    """
    hidden, cut = model.hidden, tensor_parallel
    layers = -(-model.layers // pipeline_parallel)
    matrices = [model.vocabulary // cut * hidden, model.sequence * hidden]
    vectors: list[int] = []
    for _ in range(layers):
        matrices += [3 * hidden * hidden // cut, hidden * hidden // cut]  # attention: in, out
        matrices += [4 * hidden * hidden // cut] * 2
        # Of the biases, those of what is cut by columns are cut too; the others and the norms are on every rank.
        vectors += [hidden, hidden, 3 * hidden // cut, hidden, hidden, hidden, 4 * hidden // cut, hidden]
    if pipeline_parallel == 1:
        vectors += [hidden, hidden]
    return tuple(matrices), tuple(vectors)


def of_count(parameters: int, model_parallel: int = 1) -> Groups:
    """A model of which nothing but the size is known: taken to divide evenly, however it is cut."""
    return ((-(-parameters // model_parallel),),)


def count(groups: Groups) -> int:
    return sum(map(sum, groups))
