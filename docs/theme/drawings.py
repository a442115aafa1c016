"""Makes an SVG file a part of a page, so that it follows the page's palette and not the system's."""

import re

SMALLEST_TEXT = 12  # px, on a phone


def inline(svg: str, name: str) -> str:
    """Returns HTML of a drawing, which scrolls in its box where its text would become too small to read.

    `svg` is by docs/figures/draw.py, or by matplotlib with rcParams["svg.fonttype"] = "none". For the latter,
    docs/theme/extra.css replaces the colors, and `name` keeps the identifiers apart from those of other
    drawings on the page.
    """
    drawing = svg[svg.index("<svg") :].strip()
    if "Matplotlib" in svg:
        # Its style would count for the whole page.
        drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawing, flags=re.DOTALL)
        drawing = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
        drawing = drawing.replace("<svg ", '<svg class="plot" role="img" ', 1)
        drawing = re.sub(r"\n+", "\n", drawing)  # an empty line would end it as part of Markdown
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', drawing)[0])
    smallest = min(float(size) for size in re.findall(r"font(?:-size)?: (?:\d+ )?([\d.]+)px", drawing))
    narrowest = width * SMALLEST_TEXT / smallest
    drawing = drawing.replace("<svg ", f'<svg style="min-width: {narrowest:.0f}px" ', 1)
    return f'<div class="scrolls">{drawing}</div>'
