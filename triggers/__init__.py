"""Detectors of triggers, one per file; `docs/architecture.md` lists what a new kind of trigger needs."""
