"""Conversations that outlive the process: their history, branches and settled KV."""

from keepwarm.sessions.kept import Kept, KeptAnswers
from keepwarm.sessions.sessions import Session, Sessions
from keepwarm.sessions.turn import Turn
from keepwarm.sessions.views import SessionInfo, SessionView

__all__ = ["Kept", "KeptAnswers", "Session", "SessionInfo", "SessionView", "Sessions", "Turn"]
