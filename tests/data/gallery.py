"""Pictures that exist by their sizes alone, and schedules made of them."""

import warnings
from pathlib import Path
from typing import Any

from blockskip.config import Config
from blockskip.data.pictures import Picture
from blockskip.data.schedule import Sample, Schedule, make_schedule
from blockskip.data.sizes import scaled_size
from blockskip.settings import from_flat

RESOLUTION, FULL, STRIDE = 64, 128, 8
LANDSCAPE, PORTRAIT, SQUARE = (300, 200), (200, 300), (150, 150)


def config(**keys: Any) -> Config:
    flat = {"train.steps": 20, "train.gradient_accumulation_steps": 1}
    return from_flat(flat | {name.replace("__", "."): value for name, value in keys.items()})


def gallery(*sizes: tuple[int, int], is_class: bool = False) -> list[Picture]:
    kind = "class" if is_class else "subject"
    return [
        Picture(Path(f"{kind}{i}"), str(i), size, scaled_size(size, RESOLUTION, FULL), f"{kind} {i}", is_class)
        for i, size in enumerate(sizes)
    ]


def schedule_of(config: Config, pictures: list[Picture], **options: Any) -> Schedule:
    given: dict[str, Any] = {
        "resolution": RESOLUTION,
        "full_resolution": FULL,
        "stride": STRIDE,
        "distribution": "uniform",
        "shift": 1.0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_schedule(config, pictures, **given | options)


def samples(schedule: Schedule) -> list[Sample]:
    return [sample for group in schedule.groups for sample in group.samples]


def inside(schedule: Schedule) -> bool:
    return all(
        sample.box[0] >= 0
        and sample.box[1] >= 0
        and min(sample.box[2:]) >= 1
        and sample.box[0] + sample.box[2] <= schedule.pictures[sample.picture].scaled[0]
        and sample.box[1] + sample.box[3] <= schedule.pictures[sample.picture].scaled[1]
        for sample in samples(schedule)
    )
