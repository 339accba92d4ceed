"""The browser for this folder's tests."""

from tests.browser import browser as browser
