"""What an answer has that its OpenAPI description does not name.

A validator does not see it: answers may grow, so their schemas allow further keys.
"""

from __future__ import annotations

from typing import Any


def undescribed(description: dict[str, Any], schema: str, value: Any) -> list[str]:
    """Paths of keys (`sources[].cluster`) that the named schema of the description does not have; sorted."""
    schemas = description["components"]["schemas"]
    return sorted(set(_further(schemas, schemas[schema], value, "")))


def _further(schemas: dict[str, Any], schema: dict[str, Any], value: Any, path: str) -> list[str]:
    for choice in schema.get("anyOf", ()):
        is_null = choice.get("type") == "null"
        if not is_null and value is not None:
            return _further(schemas, choice, value, path)
    if "$ref" in schema:
        return _further(schemas, schemas[schema["$ref"].rpartition("/")[2]], value, path)
    if isinstance(value, list):
        return [name for each in value for name in _further(schemas, schema["items"], each, f"{path}[]")]
    if not isinstance(value, dict):
        return []
    found = []
    for key, held in value.items():
        name = f"{path}.{key}" if path else key
        known = schema.get("properties", {}).get(key)
        found += [name] if known is None else _further(schemas, known, held, name)
    return found
