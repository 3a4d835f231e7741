"""The catalogues of translations: complete, without guesses, with the placeholders of the English texts, compiled."""

import pytest
from babel.messages import Catalog

from scripts import translations

pytestmark = pytest.mark.core

JOBS = ("%(number)s job", "%(number)s jobs")
CATALOGUES = sorted(translations.LOCALE.glob("*/LC_MESSAGES/django.po"))


@pytest.fixture(scope="module")
def texts():
    return translations.extract_texts()


def test_the_german_catalogue_exists():
    assert "de" in [path.parent.parent.name for path in CATALOGUES]


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parent.parent.name)
def test_each_catalogue_is_complete_and_compiled(path, texts):
    assert translations.find_problems(path, texts) == []


@pytest.mark.parametrize(
    ("english", "translation", "problem"),
    [
        ("%(number)s jobs", "", "is not translated"),
        ("%(number)s jobs", "%(numbr)s Jobs", "has other placeholders in its translation"),
        ("%(number)s jobs", "Jobs", "has other placeholders in its translation"),
        ("the task {tasks}", "der Task {task}", "has other placeholders in its translation"),
        ("<b>now</b>", "<b>jetzt", "has other placeholders in its translation"),
        ("Done.", "Fertig", "ends differently in its translation"),
        (JOBS, ("%(number)s Job", "%(nmber)s Jobs"), "has other placeholders in its translation"),
        (JOBS, ("%(number)s Job", ""), "is not translated"),
    ],
)  # fmt: skip
def test_the_check_finds_a_wrong_translation(english, translation, problem):
    catalogue = Catalog(locale="de")
    catalogue.add(english, translation)
    assert translations.check_message(catalogue.get(english)) == [problem]


def test_the_check_finds_a_guess():
    catalogue = Catalog(locale="de")
    catalogue.add("Done.", "Fertig.", flags=["fuzzy"])
    assert translations.check_message(catalogue.get("Done.")) == ["is fuzzy"]


def test_the_check_finds_a_missing_text_and_an_outdated_compilation(tmp_path, texts):
    path = tmp_path / "de" / "LC_MESSAGES" / "django.po"
    path.parent.mkdir(parents=True)
    catalogue = translations.read_catalogue(CATALOGUES[0])
    path.write_bytes(translations.format_po(catalogue))
    path.with_suffix(".mo").write_bytes(translations.compile_mo(catalogue))
    assert translations.find_problems(path, texts, root=tmp_path) == []
    catalogue.delete("Needs attention")
    path.write_bytes(translations.format_po(catalogue))
    problems = "\n".join(translations.find_problems(path, texts, root=tmp_path))
    assert "has other texts than the package" in problems
    assert "django.mo is outdated" in problems
