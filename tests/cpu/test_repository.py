"""Rules of the repository that no other tool checks: forbidden names, dead links, sizes, what the files promise."""

import ast
import fnmatch
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules"})
TEXT_SUFFIXES = frozenset({"", ".cfg", ".jinja", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"})

# Spelled in pieces, so that this file is clean too.
FORBIDDEN = {
    "a package registry's host": "|".join(
        rf"\b{name}\.{end}\b"
        for name, end in [
            ("py" + "pi", "org"),
            ("py" + "pi", "nvidia"),
            ("python" + "hosted", "org"),
            ("download.py" + "torch", "org"),
            ("ana" + "conda", "(?:org|com)"),
            ("npm" + "js", "(?:org|com)"),
            ("docker", "io"),
            ("gh" + "cr", "io"),
            ("quay", "io"),
            ("nvcr", "io"),
        ]
    ),
    "a choice of package index": "--(?:extra-)?index-" + "url|--find-" + "links",
    "a path of one machine": r"(?<![\w.\-*])/(?:work|home|root|Users)" + r"/\w",
}

MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
MAX_FILE_LINES = 500
LONG_FOR_A_REASON: Mapping[str, str] = {}
"""What may be longer: a file (``kernels/x.py``) or a function (``kernels/x.py:f``), and why it is not cut up."""

Lengths = dict[str, int]


def text_files(root: Path) -> Iterator[Path]:
    """Yield the repository's own text files: nothing that was built, installed or cached."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            is_hidden = path.name.startswith(".") and path.name != ".ci"
            if not is_hidden and path.name not in SKIPPED_FOLDERS and not path.name.endswith(".egg-info"):
                yield from text_files(path)
        elif path.suffix in TEXT_SUFFIXES and not path.name.startswith("."):
            yield path


def forbidden_names(text: str) -> list[str]:
    """Return what a text mentions and must not."""
    return [f"{kind}: {found}" for kind, pattern in FORBIDDEN.items() for found in re.findall(pattern, text)]


def broken_links(page: Path, text: str) -> list[str]:
    """Return the relative links of a Markdown page that lead to no file, or to no heading of it."""
    return [target for target in links(text) if not leads_somewhere(page, target)]


def missing_modules(text: str) -> list[str]:
    """Return the files of Python that a text names in code and that are nowhere.

    Those of superseded decisions are left out, and so are sources, which are other projects' files.
    """
    if re.search(r"^Status: superseded", text, flags=re.MULTILINE):
        return []
    named = re.findall(r"`([a-z][\w/]*\.py)`", re.sub(r"^ *Source.*", "", text, flags=re.MULTILINE))
    return [name for name in named if not any(f"/{known}".endswith(f"/{name}") for known in TEXTS)]


def wrapped_commands(text: str) -> list[str]:
    """Return lines of a Markdown page with a command that was wrapped as prose: continued, and outside of code."""
    prose = re.sub(r"^(```|~~~).*?^\1|^ {4}[^\n]*$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in prose.splitlines() if re.search(r" \\( |$)", line)]


def links(text: str) -> list[str]:
    """Return the targets of a page's links that are not addresses, code left out."""
    prose = re.sub(r"^(```|~~~).*?^\1|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"\]\(<?([^)\s>]+)", prose)
    referenced = re.findall(r"^\[[^\]]+\]:\s*<?([^\s>]+)", prose, flags=re.MULTILINE)
    return [target for target in inline + referenced if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def leads_somewhere(page: Path, target: str) -> bool:
    """Return whether a link's file exists, and its heading when it names one of a Markdown page."""
    name, _, heading = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists() or not path.resolve().is_relative_to(ROOT):
        return False
    return not heading or path.suffix != ".md" or heading in headings(path.read_text())


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as Markdown viewers form them."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@cache
def parsed(text: str) -> ast.Module:
    """Parse a module; several checks read it."""
    return ast.parse(text)


def lengths(name: str, text: str) -> tuple[Lengths, Lengths]:
    """Return the lines of a file and of each function in it. Triton kernels and tables of constants count nothing."""
    tree = parsed(text)
    functions = {
        f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node)
    }
    exempt = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) or is_kernel(node)]
    exempt_lines = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in exempt)
    return {name: len(text.splitlines()) - exempt_lines}, functions


def is_kernel(node: ast.stmt) -> bool:
    """Return whether a statement is a function that Triton compiles."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def too_long(name: str, text: str) -> set[str]:
    """Return the file, and the functions of it, that are over their limit."""
    files, functions = lengths(name, text)
    over = {key for key, lines in functions.items() if lines > MAX_FUNCTION_LINES}
    return over | {key for key, lines in files.items() if lines > MAX_FILE_LINES}


def with_many_parameters(name: str, text: str) -> Iterator[str]:
    """Yield the functions of a file with too many parameters, without ``self``; functions that are compiled may."""
    for scope in ast.walk(parsed(text)):
        owner = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        for node in getattr(scope, "body", ()) if isinstance(scope, ast.Module | ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_compiled(node):
                parameters = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(parameters) - (parameters[:1] in (["self"], ["cls"])) > MAX_PARAMETERS:
                    yield f"{name}:{owner}{node.name}"


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton or Numba compiles a function."""
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return any("jit" in d or d.partition("(")[0] in ("helper", "kernel") for d in decorators)


def undefined_names(text: str, sources: Mapping[str, str]) -> list[str]:
    """Return the names in a text, written as ``file.py:name`` or ``file.py:Class.method``, that no file defines."""
    undefined = []
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        body = ast.parse(sources.get(file, "")).body
        for part in name.split("."):
            found = [x for x in body if isinstance(x, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
            body = next((x.body for x in found if x.name == part), [])
        if not body:
            undefined.append(f"{file}:{name}")
    return undefined


def listed_functions(text: str) -> list[str]:
    """Return the first column of the table of functions with many parameters; ``*`` stands for anything."""
    _, _, section = text.partition("### Functions with many parameters\n")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n#")[0], flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(.*?)`", row)]


def compiler_faults(name: str, text: str) -> list[str]:
    """Return what is wrong with how a file uses a compiler of kernels.

    Only ``*_triton.py`` imports Triton and only ``*_numba.py`` Numba, and mypy leaves these files alone.
    """
    imports = {
        (alias.name if isinstance(node, ast.Import) else str(node.module)).split(".")[0]
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    faults = [
        f"{name} imports {compiler}; only a *_{compiler}.py may"
        for compiler in ("triton", "numba")
        if compiler in imports and not name.endswith(f"_{compiler}.py")
    ]
    if name.endswith(("_triton.py", "_numba.py")) != ("# mypy: ignore-errors" in text.splitlines()):
        faults.append(f"{name}: the line '# mypy: ignore-errors' belongs into files of kernels, and nowhere else")
    return faults


def attributes_checked_at_run_time(text: str) -> list[str]:
    """Return the attributes of protocols for ``isinstance``, which from Python 3.12 on finds no module's parameters."""
    if "runtime_checkable" not in text:
        return []
    return [
        f"{protocol.name}.{ast.unparse(member.target)}"
        for protocol in ast.walk(parsed(text))
        if isinstance(protocol, ast.ClassDef) and "runtime_checkable" in map(ast.unparse, protocol.decorator_list)
        for member in protocol.body
        if isinstance(member, ast.AnnAssign)
    ]


def specialized_conversions(text: str) -> list[str]:
    """Return conversions of integers that launched kernels are specialized for.

    An argument of 1 is a constant then, which has no ``to``.
    """
    return [
        f"{function.name}: {ast.unparse(node)}"
        for function in ast.walk(parsed(text))
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and ast.unparse(node.func.value) in {argument.arg for argument in function.args.args}
        and ast.unparse(node.func.value) not in not_specialized(function)
    ]


def not_specialized(kernel: ast.FunctionDef) -> list[str]:
    """Return the arguments that ``do_not_specialize`` names."""
    return [
        name
        for decorator in kernel.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == "do_not_specialize"
        for name in ast.literal_eval(keyword.value)
    ]


PACKAGE = ROOT / "src" / "strandline"
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in text_files(ROOT)}
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_kind_of_file_is_read() -> None:
    expected = {"README.md", "Makefile", ".ci/run", "pyproject.toml", "docs/glossary.md", "src/strandline/ids.py"}
    assert expected <= set(TEXTS)


def test_integers_that_kernels_convert_are_not_specialized() -> None:
    found = {name: specialized_conversions(text) for name, text in SOURCES.items() if name.endswith("_triton.py")}
    assert {name: conversions for name, conversions in found.items() if conversions} == {}


def test_files_name_no_registry_and_no_machine() -> None:
    found = {name: forbidden_names(text) for name, text in TEXTS.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_relative_links_lead_somewhere() -> None:
    found = {name: broken_links(ROOT / name, text) for name, text in TEXTS.items() if name.endswith(".md")}
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_pages_name_modules_that_exist() -> None:
    pages = {name: text for name, text in TEXTS.items() if name.endswith(".md")}
    current = {name: text for name, text in pages.items() if not name.startswith(("CHANGELOG", "benchmarks/results/"))}
    found = {name: missing_modules(text) for name, text in current.items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_docstrings_and_comments_name_modules_that_exist() -> None:
    found = {name: missing_modules(text) for name, text in SOURCES.items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_commands_can_be_copied() -> None:
    found = {name: wrapped_commands(text) for name, text in TEXTS.items() if name.endswith(".md")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_functions_and_files_are_short_or_say_why_not() -> None:
    found = set().union(*(too_long(name, text) for name, text in SOURCES.items()))
    assert found == set(LONG_FOR_A_REASON), "cut it up, or give the reason; strike out what is short again"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_pages_name_functions_that_exist(page: str) -> None:
    assert undefined_names(TEXTS[page], SOURCES) == []


def test_functions_take_few_parameters_or_say_why_not() -> None:
    found = [key for name, text in SOURCES.items() for key in with_many_parameters(name, text)]
    listed = listed_functions(TEXTS["CONTRIBUTING.md"])
    assert [key for key in found if not any(fnmatch.fnmatchcase(key, pattern) for pattern in listed)] == []
    assert [pattern for pattern in listed if not fnmatch.filter(found, pattern)] == [], "strike these out"


def test_compilers_stay_in_files_that_say_so() -> None:
    assert [fault for name, text in SOURCES.items() for fault in compiler_faults(name, text)] == []


def test_protocols_checked_at_run_time_have_methods_and_properties_alone() -> None:
    found = {name: attributes_checked_at_run_time(text) for name, text in SOURCES.items()}
    assert any("runtime_checkable" in text for text in SOURCES.values())
    assert {name: attributes for name, attributes in found.items() if attributes} == {}


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [name[:5] for name in names] == [f"{number:04}-" for number in range(1, len(names) + 1)]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = [line for line in TEXTS[".ci/run"].splitlines() if line.startswith("exec ")]
    assert commands == ["exec make test"]
    assert re.search(r"^ *make test$", TEXTS["README.md"], flags=re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_every_dependency_is_pinned_and_explained() -> None:
    project = tomllib.loads(TEXTS["pyproject.toml"])["project"]
    wanted = {re.split(r"[<>=]", line)[0] for line in project["dependencies"] + project["optional-dependencies"]["dev"]}
    pinned = {line.split("==")[0] for line in TEXTS["constraints.txt"].splitlines() if not line.startswith("#")}
    assert wanted == pinned
    lines = [line.strip() for line in TEXTS["pyproject.toml"].splitlines()]
    for requirement in project["dependencies"]:
        assert lines[lines.index(f'"{requirement}",') - 1].startswith("# "), requirement


# The checks themselves: each finds a fault that was put in.


@pytest.mark.parametrize(
    "text", ["https://py" + "pi.org/simple", "pip --index-" + "url x", "cd /wo" + "rk/main", "`/ho" + "me/me/x`"]
)
def test_a_forbidden_name_is_found(text: str) -> None:
    assert len(forbidden_names(text)) == 1


@pytest.mark.parametrize("text", ["src/work/x", "GET /v1/home/x", "a docker image", "lib/root/x"])
def test_an_innocent_name_is_let_pass(text: str) -> None:
    assert forbidden_names(text) == []


@pytest.mark.parametrize(
    "text", ["[a](none.md)", "![a](none.png)", "[a](README.md#none)", "[a](#none)", "[a]: none.md", "[a](../../x)"]
)
def test_a_broken_link_is_found(text: str) -> None:
    assert len(broken_links(ROOT / "README.md", f"# Title\n\n{text}\n")) == 1


@pytest.mark.parametrize(
    "text",
    ["[a](docs/glossary.md)", "[a](https://example.org/x)", "`[a](none.md)`", "```\n[a](none.md)\n```", "[a](docs)"],
)
def test_a_sound_link_is_let_pass(text: str) -> None:
    assert broken_links(ROOT / "README.md", text) == []


def test_a_missing_module_is_found() -> None:
    assert missing_modules("`none.py`, `cache/none.py`, `core.py`, `cache/core.py`") == ["none.py", "cache/none.py"]
    assert missing_modules("Status: superseded by another.\n\n`none.py`") == []
    assert missing_modules("Source: another project (`none.py`)\n``none.py``") == ["none.py"]


def test_a_wrapped_command_is_found() -> None:
    command = "python benchmarks/gpu.py --only decode \\\n    --memory 7GiB\n"
    assert wrapped_commands(f"# Title\n\n```\n{command}```\n\n    make \\\n") == []
    assert len(wrapped_commands(f"# Title\n\n{command}")) == 1


def test_a_long_function_and_a_long_file_are_found() -> None:
    body = "    pass\n"
    assert too_long("x.py", "def f():\n" + body * 79) == set()
    assert too_long("x.py", "def f():\n" + body * 80) == {"x.py:f"}
    assert too_long("x.py", "@triton.jit\ndef f():\n" + body * 600) == set()
    assert too_long("x.py", "f()\n" * 501) == {"x.py"}
    assert too_long("x.py", "TABLE = [\n" + "    1,\n" * 600 + "]\n") == set()


def test_an_undefined_name_is_found() -> None:
    sources = {"a/b.py": "class C:\n    def f(self): ..."}
    assert undefined_names("`a/b.py:C`, `a/b.py:C.f`, `a/b.py`", sources) == []
    assert undefined_names("`a/b.py:C.g`, `b.py:C`, `a/b.py:f`", sources) == ["a/b.py:C.g", "b.py:C", "a/b.py:f"]


def test_a_function_with_many_parameters_is_found() -> None:
    eight = "a, b, c, d, e, f, g, *, h"
    assert list(with_many_parameters("x.py", f"def f({eight}): ...")) == []
    assert list(with_many_parameters("x.py", f"def f({eight}, i=1): ...")) == ["x.py:f"]
    assert list(with_many_parameters("x.py", f"class C:\n    def __init__(self, {eight}): ...")) == []
    assert list(with_many_parameters("x.py", f"class C:\n    def f(self, {eight}, i): ...")) == ["x.py:C.f"]
    compiled = f"@triton.jit\ndef f({eight}, i): ...\n@helper\ndef g({eight}, i): ..."
    assert list(with_many_parameters("x.py", compiled)) == []
    table = (
        "### Functions with many parameters\n\n| function | reason |\n| `x.py:f`, `y/*` | `z` |\n\n## Next\n| `a` | b |"
    )
    assert listed_functions(table) == ["x.py:f", "y/*"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kernels/x.py", "def f():\n    import triton"),
        ("kernels/x.py", "from triton import language"),
        ("kernels/x.py", "# mypy: ignore-errors"),
        ("kernels/x_triton.py", "import triton"),
        ("kernels/x.py", "from numba import njit"),
        ("kernels/x_numba.py", "import numba"),
    ],
)
def test_a_compiler_in_the_wrong_place_is_found(name: str, text: str) -> None:
    assert len(compiler_faults(name, text)) == 1


def test_an_attribute_of_a_protocol_is_found() -> None:
    text = "@runtime_checkable\nclass P(Protocol):\n    x: int\n    def f(self): ..."
    assert attributes_checked_at_run_time(text) == ["P.x"]
    assert attributes_checked_at_run_time(text.replace("@runtime_checkable\n", "")) == []


def test_a_conversion_of_a_specialized_integer_is_found() -> None:
    kernel = "@triton.jit\ndef _add_kernel(out_ptr, count, N: tl.constexpr):\n    x = count.to(tl.int64)"
    assert specialized_conversions(kernel) == ["_add_kernel: count.to(tl.int64)"]
    assert specialized_conversions(kernel.replace("jit", "jit(do_not_specialize=['count'])")) == []
    assert specialized_conversions(kernel.replace("_kernel(", "_rows(")) == []
