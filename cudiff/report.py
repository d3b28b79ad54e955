"""What an evaluation found, as numbers and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

MEANINGLESS = "not meaningful"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `cudiff.evaluate.evaluate` found. Shares lie in [0, 1]; lists have one entry for each class, None where it
    has no images.

    as_asked: samples classified as the class asked for, None for an unconditional model; `as_asked_by_class` alike.
    found_by_class: share of the samples that the classifier sees in each class. Of data without labels all of these
    are None, the lists empty.
    features: which these are, in words. classifier_accuracy: share of the test images, or of their rotations, that the
    network is right on; None where it was not asked.
    frechet, kernel, precision, recall: of `samples` samples to the `test` test images, see `cudiff.distances`; with
    `_real`, of `real` training images to the same; where `against` is "train", with training and test images exchanged.
    frechet is None where one side has too few for a covariance, precision and recall where one has too few neighbours.
    variance: within-class variance of the samples' features over that of as many training images.
    notes: what to know before the numbers are believed, one line each.
    """

    data: str
    samples: int
    real: int
    test: int
    seed: int
    guidance: float | None
    features: str
    frechet: float | None
    frechet_real: float | None
    kernel: float
    kernel_real: float
    precision: float | None
    precision_real: float | None
    recall: float | None
    recall_real: float | None
    against: str = "test"
    classifier_accuracy: float | None = None
    class_names: tuple[str, ...] = ()
    as_asked: float | None = None
    as_asked_by_class: list[float | None] | None = None
    found_by_class: list[float | None] = field(default_factory=list)
    variance: float | None = None
    variance_by_class: list[float | None] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON."""
        return asdict(self)

    def table(self) -> Group:
        """Rich tables: the classes, where there are some, then the distances, and the notes. Print them with rich."""
        lines = [f"features: {self.features}", *self.notes]
        return Group(*([self._classes()] if self.class_names else []), self._distances(), Text("\n".join(lines)))

    def _title(self) -> Text:
        guidance = "" if self.guidance is None else f", guidance {self.guidance:g}"
        return Text(f"{self.samples:,} samples against {self.data}{guidance}, seed {self.seed}", "table.title")

    def _classes(self) -> Table:
        table = Table(title=self._title(), show_footer=True)
        shares, total = self.found_by_class, 1.0
        if self.as_asked is not None and self.as_asked_by_class is not None:
            shares, total = self.as_asked_by_class, self.as_asked
        table.add_column("class", "all")
        heading = "classified so" if self.as_asked is None else "classified as asked"
        table.add_column(heading, f"{total:.1%}", justify="right")
        table.add_column("variance, real = 1", _cell(self.variance, ".2f"), justify="right")
        for name, share, variance in zip(self.class_names, shares, self.variance_by_class, strict=True):
            table.add_row(Text(name), _cell(share, ".1%"), _cell(variance, ".2f"))
        table.caption = f"the classifier is right on {self.classifier_accuracy:.2%} of the test images"
        return table

    def _distances(self) -> Table:
        table = Table(title=None if self.class_names else self._title())
        images = f"{self.test:,} test images", f"{self.real:,} training images"
        reference, others = images if self.against == "test" else images[::-1]
        table.add_column(f"to {reference}")
        for name in (f"{self.samples:,} samples", others):
            table.add_column(name, justify="right")
        for name, form, *values in (
            ("Fréchet distance", ".3f", self.frechet, self.frechet_real),
            ("kernel distance", ".3g", self.kernel, self.kernel_real),
            ("precision", ".1%", self.precision, self.precision_real),
            ("recall", ".1%", self.recall, self.recall_real),
        ):
            table.add_row(name, *(_cell(value, form, MEANINGLESS) for value in values))
        return table


def _cell(value: float | None, form: str, missing: str = "–") -> str:
    return missing if value is None else format(value, form)
