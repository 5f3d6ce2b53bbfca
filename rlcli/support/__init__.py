"""Shared by all packages: files, reading, texts without secrets, imports, requests to servers, the machine."""
