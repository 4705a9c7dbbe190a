"""Questions about the syntax tree of Python tests, without regard to which names are the program's."""

import ast
import symtable
from collections.abc import Iterator

PROGRAM_MODULES = ("solution", "program", "main", "submission", "answer")
"""Names under which Python tests import the program."""
SWALLOWED = {"AssertionError", "Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def loads(node: ast.AST) -> set[str]:
    return {each.id for each in names_of(node) if isinstance(each.ctx, ast.Load)}


def names_of(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def decorators_of(node: Function | ast.ClassDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def called_in(node: ast.AST) -> set[str]:
    return {each.func.id for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}


def free_names(source: str, bound: bool = False) -> set[str]:
    """Names that a module uses without binding them, so that they come from elsewhere. With `bound`, the names that it
    binds."""
    used, assigned, tables = set(), set(), [symtable.symtable(source, "label", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                assigned |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return assigned if bound else used - assigned


def statements_of(node: ast.stmt, any_method: bool = False) -> list[ast.stmt]:
    """Statements in a function's body. For a class, those in the bodies of all its methods, if one of these is a test
    or `any_method` is set; otherwise none."""
    if isinstance(node, Function):
        return node.body
    methods = [each for each in getattr(node, "body", []) if isinstance(each, Function) and not is_skipped(each)]
    run = any_method or any(method.name.startswith("test") for method in methods)
    return [statement for method in methods for statement in method.body] if run else []


def names_from_program(node: ast.AST) -> set[str]:
    """Names that the import statement `node` binds if it imports the program under test (one of PROGRAM_MODULES);
    otherwise none."""
    if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
        return {alias.asname or alias.name for alias in node.names} - {"*"}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name for alias in node.names if alias.name in PROGRAM_MODULES}
    return set()


def flow(node: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """Data flow of a syntax node: (expressions that it reads, expressions whose values it sets or may change)."""
    if isinstance(node, ast.Assign):
        return [node.value], list(node.targets)
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return [node.value] if node.value else [], [node.target]
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return [node.iter], [node.target]
    if isinstance(node, ast.Try | ast.If | ast.While):
        return [node], [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    if isinstance(node, ast.withitem):
        return [node.context_expr], [node.optional_vars] if node.optional_vars else []
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [node.func, *given], [each for each in (*given, *receiver) if isinstance(each, ast.Name)]
    return [], []


def operands_of(node: ast.AST) -> list[ast.expr]:
    """The operands that an assertion compares: those of an `assert` statement, or the arguments of an assertion call.
    Empty for any other node."""
    if isinstance(node, ast.Call):
        return node.args if is_assertion_call(node) else []
    if not isinstance(node, ast.Assert):
        return []
    test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
    if isinstance(test, ast.BoolOp):
        return [each for value in test.values for each in operands_of(ast.Assert(value))]
    return [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]


def is_assertion_call(call: ast.Call) -> bool:
    """Whether a call is an assertion of unittest, pytest or numpy, by its name: it begins with `assert` or `fail`, or
    is `raises`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.startswith(("assert", "fail")) or name == "raises"


def is_test_class(node: ast.ClassDef) -> bool:
    of_unittest = any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    return (of_unittest or node.name.startswith("Test")) and not is_skipped(node)


def is_skipped(node: Function | ast.ClassDef) -> bool:
    return any("skip" in ast.unparse(each) for each in node.decorator_list)


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that a module with the statements `body` certainly executes: those of `body`, where
    `if __name__ == "__main__"` is replaced by the statements in it."""
    for node in body:
        if isinstance(node, ast.If) and "__name__" in loads(node.test):
            yield from top_level(node.body)
        else:
            yield node


def header_of(node: ast.stmt) -> ast.AST:
    """The expressions of a statement itself, as a tuple, without the statements nested in it."""
    inner = {"body", "orelse", "finalbody", "handlers", "cases"}
    parts = [value for name, value in ast.iter_fields(node) if name not in inner]
    flat = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    items = [each.context_expr if isinstance(each, ast.withitem) else each for each in flat]
    return ast.Tuple([each for each in items if isinstance(each, ast.expr)], ast.Load())


def blocks_of(node: ast.stmt, tree: ast.Module) -> list[list[ast.stmt]]:
    """Blocks of statements nested in the statement `node`, as lists, that may be executed and whose failed assertions
    `node` does not catch. `tree`: the module."""
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant) and not node.test.value:
        return [node.orelse]
    if isinstance(node, ast.For | ast.AsyncFor) and is_empty(node.iter, tree):
        return [node.orelse]
    if isinstance(node, ast.With) and any("suppress(" in ast.unparse(item.context_expr) for item in node.items):
        return []
    if isinstance(node, ast.Try | ast.TryStar):
        caught = any(catches_assertions(handler) for handler in node.handlers)
        blocks = [] if caught else [node.body]
        return [*blocks, *(handler.body for handler in node.handlers), node.orelse, node.finalbody]
    if isinstance(node, ast.Match):
        return [case.body for case in node.cases]
    return [block for name in ("body", "orelse") if isinstance(block := getattr(node, name, None), list)]


def is_empty(node: ast.expr, tree: ast.Module) -> bool:
    """Whether an expression is an empty literal, such as [], or a name whose only use besides this one is to be
    assigned an empty literal. `tree`: the module."""
    if isinstance(node, ast.Name):
        values = [each.value for each in ast.walk(tree) if isinstance(each, ast.Assign)
                  and any(getattr(target, "id", "") == node.id for target in each.targets)]  # fmt: skip
        uses = sum(isinstance(each, ast.Name) and each.id == node.id for each in ast.walk(tree))
        return len(values) == 1 and uses == 2 and not isinstance(values[0], ast.Name) and is_empty(values[0], tree)
    elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [node])
    return not elements


def catches_assertions(handler: ast.ExceptHandler) -> bool:
    named = ast.unparse(handler.type).strip("()").split(", ") if handler.type else SWALLOWED
    kinds = {each.split(".")[-1] for each in named}
    return bool(kinds & SWALLOWED) and not any(isinstance(each, ast.Raise) for each in ast.walk(handler))
