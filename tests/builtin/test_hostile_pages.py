"""Pages and robots.txt files that are written to keep a parser busy."""

from __future__ import annotations

from lxml import html

from toolcell.builtin.web.pages import MAX_ATTRIBUTES, MAX_ELEMENTS, article_of, bounded_markup

STORY = "<p>The harbour of the town was rebuilt in the spring, after the storm had broken its old wall twice.</p>" * 4


def most_attributes(page: str) -> int:
    return max(len(element.attrib) for element in html.fromstring(page).iter(html.etree.Element))


def test_a_tag_with_very_many_attributes_reaches_no_parser() -> None:
    flood = " ".join(f"a{number}=1" for number in range(3000))
    quotes = [f"<p {flood}>x</p>", f'<p " x=">" {flood}>x</p>', f"<p x='>' {flood}>x</p>", f'<p a="<" {flood} b=">">']
    for page in quotes:
        assert most_attributes(f"<html><body>{page}{STORY}") > 1000, "the page attacks nothing"
        written = bounded_markup(f"<html><body>{page}{STORY}")
        assert written is not None
        assert most_attributes(written) <= MAX_ATTRIBUTES


def test_a_page_of_very_many_elements_is_read_without_extraction() -> None:
    page = "<html><body>" + "<p>a" * (MAX_ELEMENTS + 1)
    assert bounded_markup(page) is None
    assert article_of(page).startswith("a\na\n")


def test_what_is_written_anew_has_the_same_elements_attributes_and_text() -> None:
    page = f"""<!doctype html><html lang=en><head><title>A &amp; B</title><script>if (a < b) x("<p>")</script></head>
    <body><div class="main story" id='x'><a href="/a?b=1&amp;c=2">1 &lt; 2</a> and 3 < 4{STORY}</div></body></html>"""
    written = bounded_markup(page)
    assert written is not None
    [link] = html.fromstring(written).xpath("//div[@class='main story'][@id='x']/a")
    assert (link.get("href"), link.text, link.tail.strip()) == ("/a?b=1&c=2", "1 < 2", "and 3 < 4")
    assert "rebuilt in the spring" in article_of(page)
    assert "<p>" not in article_of(page)
