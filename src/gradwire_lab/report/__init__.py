"""Charts as SVG, and the page of the demonstration. Only `page` needs jinja2 (of the extra `lab`)."""
