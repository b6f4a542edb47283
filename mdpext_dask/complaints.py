"""What is wrong with a job, in one line that names the key, the value and what is allowed."""

import difflib
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError


def first_complaint(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first entry of a validation error as one line for the user.

    Parameters
    ----------
    error
        What the validation of a document has raised.
    model
        What the document was validated as; its keys are proposed for one that is not known.
    """
    entries = error.errors(include_url=False)
    # An unknown key is usually the cause of the missing one that is reported beside it.
    first = next((e for e in entries if e["type"] == "extra_forbidden"), entries[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown_key(tuple(str(part) for part in first["loc"]), model)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return f"{where.rpartition('.')[0]}: has too few numbers"
    if first["type"] == "missing":
        return f"{where}: is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where and not message.startswith(where) else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _unknown_key(location: tuple[str, ...], model: type[BaseModel]) -> str:
    known = list(_known_names(location[:-1], model))
    close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.52)
    prefixed = [name for name in known if name.startswith(location[-1])]
    hint = (close or prefixed or [""])[0]
    advice = f"did you mean {hint}?" if hint else f"known here: {', '.join(known)}"
    return f"{'.'.join(location)}: unknown key; {advice}"


def _known_names(sections: tuple[str, ...], model: type[BaseModel]) -> Iterator[str]:
    for name in sections:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
