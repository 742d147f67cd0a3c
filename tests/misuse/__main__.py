"""Write the page's list of mistakes again."""

from tests.misuse.page import PAGE, page

PAGE.write_text(page(PAGE.read_text()))
