"""Do a draft model and its target mean the same tokens by the same ids?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_PADDING = 1024  # rows by which tables of the same vocabulary differ when they are padded to round numbers


def why_not_same(
    target: PreTrainedTokenizerBase | None, draft: PreTrainedTokenizerBase | None, target_size: int, draft_size: int
) -> str | None:
    """Why drafts of one model are no tokens of the other; None when they are.

    Every id that both tokenizers use must stand for the same string. One of them may have more tokens at its end, and
    the tables of the models may be padded.

    :param target_size: rows of the target's table of embeddings.
    """
    if target is not None and draft is not None:
        ours = {i: token for token, i in target.get_vocab().items()}
        theirs = {i: token for token, i in draft.get_vocab().items()}
        shared = ours.keys() & theirs.keys()
        different = [i for i in sorted(shared) if ours[i] != theirs[i]]
        if different:
            i = different[0]
            return (
                f"its tokenizer is another one: {len(different)} of {len(shared)} ids stand for other strings, "
                f"{i} for {theirs[i]!r} instead of {ours[i]!r}"
            )
        if 10 * len(shared) < 9 * max(len(ours), len(theirs)):
            return f"its tokenizer is another one: it has {len(theirs)} tokens, the target's {len(ours)}"
        return None
    if abs(target_size - draft_size) > _MAX_PADDING:
        return (
            f"its vocabulary has {draft_size} tokens and the target's {target_size}; without both tokenizers it cannot "
            "be seen that they agree where they overlap"
        )
    return None
