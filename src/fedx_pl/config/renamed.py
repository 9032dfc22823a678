"""Words that were typed in earlier versions, and what to type now."""

from fedx_pl.errors import UserError

# Commands and options with everything before them; keys alone, or with the value that was renamed.
RENAMED = {
    "fedx-pl neighbours": "fedx-pl neighbors",
    "fedx-pl sweep regularisers": "fedx-pl sweep regularizers",
}


def refuse_renamed(*words: str) -> None:
    """Raises a `UserError` that names the new word if one of these is an old one."""
    for word in words:
        if word in RENAMED:
            raise UserError(f"{word} has a new name; type {RENAMED[word]}")
