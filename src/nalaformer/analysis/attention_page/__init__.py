"""The attention page: a model's attention maps in one HTML page, in a folder or served on this machine."""

from .look import Look, look_into, read_images
from .report import PAGE_NAME, explorer_of, write_report
from .server import ExploreServer, refuse_used_port, serve
from .subject import Subject, load_subject

__all__ = [
    "PAGE_NAME",
    "ExploreServer",
    "Look",
    "Subject",
    "explorer_of",
    "load_subject",
    "look_into",
    "read_images",
    "refuse_used_port",
    "serve",
    "write_report",
]
