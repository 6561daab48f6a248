"""Places: the user's own line, whoever calls whom in between."""

import importlib.util
import sys
import threading
from pathlib import Path

import torch

from penstock.doctor.source_lines import NOWHERE, Place, find_place


def place_of(run):
    """Return where a function that torch calls is, as torch and not as this file."""
    found = []
    torch.utils._pytree.tree_map(lambda _: found.append(run()), [1])
    return found[0]


def test_the_innermost_line_outside_of_torch_is_named(monkeypatch, tmp_path):
    place = find_place()
    assert place.code == "place = find_place()"
    assert str(place) == f"{Path(__file__).relative_to(Path.cwd())}:{place.line}"
    monkeypatch.chdir(tmp_path)
    assert str(place) == f"{__file__}:{place.line}"
    assert place_of(find_place).code == "torch.utils._pytree.tree_map(lambda _: found.append(run()), [1])"


def test_a_thread_without_a_line_of_the_user_s_names_that_of_another():
    """As torch's own threads, which run backwards, and those of lanes."""
    code = compile("found.append(find_place(thread))", f"{torch.__path__[0]}/pretended.py", "exec")
    for thread, file in ((threading.get_ident(), __file__), (None, "")):
        space = {"find_place": find_place, "thread": thread, "found": []}
        worker = threading.Thread(target=exec, args=(code, space))
        worker.start()
        worker.join()
        assert space["found"][0].file == file


def test_nothing_is_no_place():
    assert NOWHERE.code == ""
    assert find_place.__module__ == "penstock.doctor.source_lines"


def test_of_a_library_s_line_the_caller_is_told(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_of_tests.py").write_text("def call(run):\n    return run()\n")
    spec = importlib.util.spec_from_file_location("library_of_tests", folder / "library_of_tests.py")
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    place = library.call(find_place)
    assert place.code == "return run()"
    assert place.caller == Place(__file__, sys._getframe().f_lineno - 2)


def test_places_can_be_keys():
    assert len({Place("a.py", 1), Place("a.py", 1), Place("a.py", 2)}) == 2
