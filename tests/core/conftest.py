"""Property tests here are judged by what they find, not by the time one example takes on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
