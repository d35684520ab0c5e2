"""Rows that drafts spoiled: a token whose keys or values are no numbers reaches rows that must not see it.

Attention gives hidden tokens the weight 0, and 0 times NaN is NaN: in the forward that checks it, such a draft spoils
the rows before it and beside it. Without drafts the request would go on, so it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt.batch_builder import BatchBuilder
from llmopt.errors import NonFiniteLogitsError
from llmopt.threads import one_torch_thread

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.pipeline import InferencePipeline


def repeat_without_drafts(pipeline: InferencePipeline, batch: Batch, accepted: AcceptedTokens) -> None:
    """Run requests once more that got no token because the logits behind their drafts were no numbers.

    Their own tokens are written to the same places again. What fails without drafts too stays an error.

    :param batch: as it was executed, with its drafts.
    :param accepted: what was decided; errors of such requests are replaced by what the second forward gives.
    """
    rows = {
        request: num_new - num_drafts
        for request, num_new, num_drafts in zip(
            batch.requests, batch.num_scheduled.tolist(), batch.num_drafts.tolist(), strict=True
        )
        if num_drafts and isinstance(accepted.errors.get(request.request_id), NonFiniteLogitsError)
    }
    if not rows:
        return
    # a builder of its own: `commit` still reads the batch. Hidden states of the second forward are asked of nobody.
    again = BatchBuilder(pipeline.batch_builder.block_size).build(list(rows), list(rows.values()))
    mask = pipeline.constrain(again, None)
    again, drafts = pipeline.exchange(again, None)
    pipeline.adapt(again)
    logits = pipeline.execute(again, drafts)
    with one_torch_thread():
        chosen = pipeline.verify(again, drafts, logits, mask)
    for request in rows:
        del accepted.errors[request.request_id]
    accepted.errors |= chosen.errors
    accepted.requests += chosen.requests
    accepted.token_ids += chosen.token_ids
    accepted.finish_reasons += chosen.finish_reasons
    if accepted.paths is not None:
        accepted.paths += [[] for _ in chosen.requests]
