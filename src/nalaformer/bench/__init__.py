"""Speed and memory of the ops and of whole backbones, side by side with their peers in one run."""

from .cases import Case, cases_for
from .fresh_process import in_fresh_process
from .implementations import IMPLEMENTATIONS, Implementation
from .language import LanguageMeasurement, LanguageResult, measure_language, plan_language, run_language
from .language_report import LANGUAGE_COLUMNS, draw_language, language_bars, language_lines, write_language_csv
from .machine import Machine, describe_machine, extras
from .memory import peak_extra_mib
from .models import MODEL_VARIANTS, ModelMeasurement, ModelResult, ModelVariant, measure_model, plan_models, run_models
from .models_report import MODEL_COLUMNS, model_bar_lines, model_bars, models_table, write_models_csv
from .ops import Measurement, Result, measure, plan
from .report import COLUMNS, results_table, summary_lines, write_csv
from .timing import median_ms
from .verdict import Bar, Growth, bars, growth

__all__ = [
    "COLUMNS",
    "IMPLEMENTATIONS",
    "LANGUAGE_COLUMNS",
    "MODEL_COLUMNS",
    "MODEL_VARIANTS",
    "Bar",
    "Case",
    "Growth",
    "Implementation",
    "LanguageMeasurement",
    "LanguageResult",
    "Machine",
    "Measurement",
    "ModelMeasurement",
    "ModelResult",
    "ModelVariant",
    "Result",
    "bars",
    "cases_for",
    "describe_machine",
    "draw_language",
    "extras",
    "growth",
    "in_fresh_process",
    "language_bars",
    "language_lines",
    "measure",
    "measure_language",
    "measure_model",
    "median_ms",
    "model_bar_lines",
    "model_bars",
    "models_table",
    "peak_extra_mib",
    "plan",
    "plan_language",
    "plan_models",
    "results_table",
    "run_language",
    "run_models",
    "summary_lines",
    "write_csv",
    "write_language_csv",
    "write_models_csv",
]
