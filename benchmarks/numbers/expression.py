"""Evaluate the expressions of notes: arithmetic, literals, names and calls of some functions, and nothing else of Python."""

from __future__ import annotations

import ast
import operator
from typing import Any

BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
COMPARE = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq}
UNARY = {ast.USub: operator.neg, ast.Not: operator.not_}
ERRORS = (LookupError, SyntaxError, ValueError, TypeError, AttributeError, OSError, ZeroDivisionError)


class NoValueError(Exception):
    """The error of an expression that has no value."""


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """Return an expression's value; NoValueError if it has none."""
    try:
        return value_of(ast.parse(expression, mode="eval").body, names)
    except ERRORS as error:
        raise NoValueError(f"{type(error).__name__} of {expression}: {error}") from error


def value_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return the value of a part of an expression."""

    def value(part: ast.AST) -> Any:
        return value_of(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.Tuple() | ast.List():
            return tuple(map(value, node.elts))
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {value(key): value(part) for key, part in zip(keys, values, strict=True) if key}
        case ast.BinOp() if type(node.op) in BINARY:
            return BINARY[type(node.op)](value(node.left), value(node.right))
        case ast.UnaryOp() if type(node.op) in UNARY:
            return UNARY[type(node.op)](value(node.operand))
        case ast.Compare(ops=[kind]) if type(kind) in COMPARE:
            return COMPARE[type(kind)](value(node.left), value(node.comparators[0]))
        case ast.BoolOp(op=ast.And()):
            return all(map(value, node.values))
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
        case ast.Call(func=ast.Name(id=name)) if name in names:
            keywords = [{part.arg: value(part.value)} if part.arg else value(part.value) for part in node.keywords]
            return names[name](*map(value, node.args), **{key: item for part in keywords for key, item in part.items()})
    raise ValueError(f"{ast.unparse(node)} is not allowed here")
