"""Write the page's list of mistakes anew."""

from tests.mistakes import PAGE, page

PAGE.write_text(page(PAGE.read_text()))
