"""Requests on their way in and events on their way out of an engine."""
