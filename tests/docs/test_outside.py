"""Links to files outside docs/ are fitted to the site."""

from __future__ import annotations

import pytest

from docs.generate.outside import site_text


@pytest.mark.parametrize(
    ("text", "source", "page", "expected"),
    [
        ("[f](../proto/FORMAT.md#a)", "docs/a.md", "a.md", "[f](project/wire-format.md#a)"),
        ("[f](../../proto/FORMAT.md)", "docs/e/a.md", "e/a.md", "[f](../project/wire-format.md)"),
        ("[code](../common/x.py)", "docs/a.md", "a.md", "code"),
        ("[r](rules.md#x)", "docs/a.md", "a.md", "[r](rules.md#x)"),
        ("[r](docs/a/r.md)", "CHANGELOG.md", "project/changelog.md", "[r](../a/r.md)"),
        ("[w](https://example.org/a)", "docs/a.md", "a.md", "[w](https://example.org/a)"),
        ("![i](images/a.png)", "docs/a.md", "a.md", "![i](images/a.png)"),
        ("[here](#x)", "docs/a.md", "a.md", "[here](#x)"),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_becomes_text(
    text: str, source: str, page: str, expected: str
) -> None:
    assert site_text(text, source, page) == expected
