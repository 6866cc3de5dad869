"""How large the parameters are that one rank holds: of a model with a run's settings, or of a model known by its size.

Engines pad and cut parameter by parameter and group by group, so a list for each of the two parameter groups (decayed,
and the vectors that are not) says more than the sum.
"""

from __future__ import annotations

from ..config.settings import Model

#: Elements of each parameter, in the model's order, for each parameter group.
Groups = tuple[tuple[int, ...], ...]


def of_model(model: Model, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> Groups:
    """The parameters of the fullest rank: with a pipeline the first, which has the embeddings.

    (The last stage has a copy of the token embedding, or an output layer as large, and no positions.)
    """
    embedding = model.vocabulary // tensor_parallel * model.hidden
    layers = -(-model.layers // pipeline_parallel)
    in_matrices, in_vectors = (_gpt2_layer if model.kind == "gpt2" else _llama_layer)(model, tensor_parallel)
    matrices, vectors = [embedding], in_vectors * layers
    if model.kind == "gpt2":
        matrices += [model.sequence * model.hidden]
    matrices += in_matrices * layers
    if pipeline_parallel == 1:
        vectors += [model.hidden] * (2 if model.kind == "gpt2" else 1)
        matrices += [] if model.kind == "gpt2" else [embedding]
    return tuple(matrices), tuple(vectors)


def _gpt2_layer(model: Model, cut: int) -> tuple[list[int], list[int]]:
    hidden, inner = model.hidden, model.inner
    matrices = [3 * hidden * hidden // cut, hidden * hidden // cut]  # attention: in, out
    matrices += [inner * hidden // cut] * 2
    # Of the biases, those of what is cut by columns are cut too; the others and the norms are on every rank.
    return matrices, [hidden, hidden, 3 * hidden // cut, hidden, hidden, hidden, inner // cut, hidden]


def _llama_layer(model: Model, cut: int) -> tuple[list[int], list[int]]:
    hidden, inner = model.hidden, model.inner
    in_attention = (model.heads + 2 * model.groups) * (hidden // model.heads)
    matrices = [in_attention * hidden // cut, hidden * hidden // cut]
    matrices += [2 * inner * hidden // cut, inner * hidden // cut]
    return matrices, [hidden, hidden]


def of_count(parameters: int, model_parallel: int = 1) -> Groups:
    """A model of which nothing but the size is known: taken to divide evenly, however it is cut."""
    return ((-(-parameters // model_parallel),),)


def count(groups: Groups) -> int:
    return sum(map(sum, groups))
