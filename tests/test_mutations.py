"""Each fault is a different valid program, and the tests that import its file are found."""

import ast
from pathlib import Path

from mutations import PACKAGE, ROOT, faults_of, importing_tests


def test_every_fault_is_a_different_valid_program(tmp_path: Path):
    program = """
def f(a: int = 3) -> int:
    if not a and a > 2:
        raise ValueError(f"µ {a + 1}")
    print(a)
    return a - 1
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    programs = [fault.faulty().decode() for fault in faults_of(path)]
    assert len({ast.dump(ast.parse(text)) for text in programs} - {ast.dump(ast.parse(program))}) == len(programs)
    for changed in (
        "a: int = 4",
        "(a) and",
        "or",
        "a >= 2",
        "pass\n    print(a)",
        "pass\n    return",
        "return None",
        "(a) + (1)",
        "> 3",
    ):
        assert any(changed in text for text in programs), changed


def test_the_tests_of_a_file_come_first():
    assert importing_tests(PACKAGE / "costs" / "transformer.py")[0] == ROOT / "tests" / "costs" / "test_transformer.py"
