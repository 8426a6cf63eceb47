"""Fields of requests: their types, and refusals of what they do not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from dgraph.errors import did_you_mean
from dgraph.serve.neutral import Neutral

OWN = "own"
"""Type of validation errors whose own message is the whole text of a refusal."""
NAMED = 64
"""Most characters of an unknown field's name that a refusal repeats."""


def _whole(text: str) -> str:
    """Check that a text has no lone surrogates, which JSON can have and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(OWN, "a text has no half of a character (a lone surrogate)") from None
    return text


def one_of(forms: str) -> WrapValidator:
    """Check a field that has several forms: a refusal names the forms, and not the faults of each."""

    def check(value: Any, valid: Any) -> Any:
        try:
            return valid(value)
        except ValidationError as error:
            own = [each["msg"] for each in error.errors() if each["type"] == OWN]
            said = own[0] if own else f"expected {forms}, got {kind_of(value)}"
            raise PydanticCustomError(OWN, "{said}", {"said": said}) from None

    return WrapValidator(check)


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value, without its texts, which may be confidential."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return "a number too large" if abs(value) >= 10**20 else str(value)
    if isinstance(value, str):
        return f"a text of length {len(value)}"
    return f"a list of length {len(value)}" if isinstance(value, list) else "an object"


def named(text: str) -> str:
    """The first characters of a name that a client gave, for a refusal; lone surrogates are written as escapes."""
    return text[:NAMED].encode(errors="backslashreplace").decode()


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first fault, as collecting a million takes half a minute."""
Text = Annotated[str, AfterValidator(_whole)]
Name = Annotated[Text, Field(max_length=100)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
"""A token id as a key of an object."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Segment = Annotated[Text | Positive, one_of("a text that is fixed, or a number of free positions, at least 1")]
Prompt = Annotated[
    Text | Listed[Text] | Listed[Id] | Listed[Listed[Id]],
    one_of("a text, a list of texts, a list of ids (whole numbers from 0), or a list of such lists"),
]
Stops = Annotated[Stop | Listed[Stop], one_of("a text of 1 to 1000 characters, or a list of such texts")]


class Fields(BaseModel):
    """Base of requests: declared fields, and those of `neutral` at their neutral values; others are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="after")
    def _check_others(self) -> Self:
        if (stray := self.stray()) is not None:
            field, said = stray
            raise PydanticCustomError(OWN, "{field} {said}", {"field": field, "said": said})
        return self

    def stray(self) -> tuple[str, str] | None:
        """A field that is neither declared nor neutral, with the reason for a refusal; None without one."""
        for field, value in (self.model_extra or {}).items():
            neutral = self.neutral.get(field)
            if neutral is None:
                hint = did_you_mean(named(field), {*type(self).model_fields, *self.neutral})
                return named(field), " ".join(
                    filter(None, ("is no field that this server knows.", hint, "Leave it out"))
                )
            if not neutral.allows(value):
                return field, f"is not supported; {neutral.advice}"
        return None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of the declared and the neutral fields, which allows no others."""
        schema = handler.resolve_ref_schema(handler(core))
        others = {name: neutral.schema for name, neutral in cls.neutral.items() if name not in cls.model_fields}
        schema["properties"] = {**schema.get("properties", {}), **others}
        schema["additionalProperties"] = False
        return schema
