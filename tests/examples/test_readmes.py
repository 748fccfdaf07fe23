"""Every example has a README whose links, files and options exist."""

from __future__ import annotations

import re

import pytest

from tests.examples.support import EXAMPLES

NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
CALL = re.compile(r"^python ([\w./-]+\.py)(.*)$", re.MULTILINE)


def text(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text("utf-8")


def test_the_overview_lists_every_example() -> None:
    overview = (EXAMPLES / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| \[([\w-]+)\]", overview, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", ["", *NAMES])
def test_links_lead_somewhere(name: str) -> None:
    links = LINK.findall(text(name))
    assert [link for link in links if not (EXAMPLES / name / link).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_named_programs_exist_and_have_the_options_that_are_given(name: str) -> None:
    for program, words in CALL.findall(text(name)):
        source = (EXAMPLES / name / program).read_text("utf-8")
        for option in re.findall(r"--[\w-]+", words):
            assert f'"{option}"' in source, (program, option)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "client-node"])
def test_it_says_how_to_use_real_data_and_where_to_get_them(name: str) -> None:
    assert "--data-dir FOLDER" in text(name)
    assert "https://github.com/zalandoresearch/fashion-mnist#get-the-data" in text(name)
    assert "apt install dataset-fashion-mnist" in text(name)
