"""What the tests of the site share."""

from tests.browser import browser as browser
