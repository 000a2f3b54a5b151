"""A Perfetto trace written packet by packet: tracks, slices in lanes that cannot clash, counters, flows.

Format: https://perfetto.dev/docs/reference/synthetic-track-event. Perfetto drops a slice that overlaps its
neighbour without being inside it, so slices that do are put on lanes side by side.
"""

from collections.abc import Mapping, Sequence
from typing import IO, Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

MAX_NAME = 1000
"""Longer names are cut: a name is repeated in every tooltip."""

Args = Mapping[str, "int | float | bool | str | None"]


class TrackEvents:
    """Writes packets to ``file`` as they come; only track ids and the distinct names are held.

    ``shift_ns`` is added to every time, because Perfetto knows no negative ones. ``packets`` counts what was written.
    """

    def __init__(self, file: IO[bytes], shift_ns: int = 0) -> None:
        self.packets = 0
        self._builder = StreamingTraceProtoBuilder(file)
        self._shift = shift_ns
        self._tracks = 0
        self._interned: dict[str, dict[str, int]] = {
            "event_names": {},
            "event_categories": {},
            "debug_annotation_names": {},
        }

    def process(self, name: str) -> int:
        """Add a process, the group that tracks are listed under, and return its track id."""
        descriptor = self._descriptor(name)
        descriptor.process.pid = descriptor.uuid
        descriptor.process.process_name = descriptor.name
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        return self._describe(descriptor)

    def track(self, name: str, parent: int, rank: int = 0) -> int:
        """Add a track for slices under ``parent``, sorted by ``rank``, and return its id."""
        return self._describe(self._descriptor(name, parent, rank))

    def counter_track(self, name: str, unit: str, parent: int, rank: int = 0) -> int:
        """Add a track for a counter in ``unit`` and return its id."""
        descriptor = self._descriptor(name, parent, rank)
        descriptor.counter.unit_name = unit[:MAX_NAME]
        return self._describe(descriptor)

    def begin(self, track: int, ns: int, name: str, category: str, args: Args, flows: Sequence[int] = ()) -> None:
        """Open a slice. ``flows``: ids that arrows are drawn between."""
        packet = self._event(track, ns, TrackEvent.TYPE_SLICE_BEGIN)
        event = packet.track_event
        event.name_iid = self._intern(packet, "event_names", name)
        event.category_iids.append(self._intern(packet, "event_categories", category))
        event.flow_ids.extend(flows)
        for key, value in args.items():
            if value is None:
                continue
            annotation = event.debug_annotations.add()
            annotation.name_iid = self._intern(packet, "debug_annotation_names", key)
            if isinstance(value, bool):
                annotation.bool_value = value
            elif isinstance(value, int):
                annotation.int_value = value
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = cut(value)
        self._write(packet)

    def end(self, track: int, ns: int) -> None:
        """Close the innermost open slice."""
        self._write(self._event(track, ns, TrackEvent.TYPE_SLICE_END))

    def count(self, track: int, ns: int, value: int | float) -> None:
        """Set a counter from ``ns`` on."""
        packet = self._event(track, ns, TrackEvent.TYPE_COUNTER)
        if isinstance(value, int):
            packet.track_event.counter_value = value
        else:
            packet.track_event.double_counter_value = value
        self._write(packet)

    def _descriptor(self, name: str, parent: int = 0, rank: int = 0) -> Any:
        self._tracks += 1
        descriptor = TrackDescriptor(uuid=self._tracks, name=cut(name), sibling_order_rank=rank)
        descriptor.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        if parent:
            descriptor.parent_uuid = parent
        return descriptor

    def _describe(self, descriptor: Any) -> int:
        packet = self._builder.create_packet()
        packet.track_descriptor.CopyFrom(descriptor)
        self._write(packet)
        return int(descriptor.uuid)

    def _event(self, track: int, ns: int, kind: int) -> Any:
        packet = self._builder.create_packet()
        packet.timestamp = ns + self._shift
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _intern(self, packet: Any, field: str, text: str) -> int:
        """Return the id of ``text``; its first use carries the text itself."""
        known = self._interned[field]
        text = cut(text)
        if text not in known:
            known[text] = len(known) + 1
            entry = getattr(packet.interned_data, field).add()
            entry.iid, entry.name = known[text], text
        return known[text]

    def _write(self, packet: Any) -> None:
        packet.trusted_packet_sequence_id = 1
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        if self.packets == 0:
            packet.sequence_flags |= TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._builder.write_packet(packet)
        self.packets += 1


class Lanes:
    """One logical track, shown on as many lanes as its slices need. Slices must come in order of start.

    ``nest``: a slice inside another is drawn below it on its lane (calls); otherwise it gets a lane of its own.
    """

    def __init__(self, events: TrackEvents, name: str, parent: int, rank: int = 0, *, nest: bool = True) -> None:
        self._events = events
        self._name = name
        self._parent = parent
        self._rank = rank
        self._nest = nest
        self._lanes: list[tuple[int, list[int]]] = []

    def add(self, start: int, end: int, name: str, category: str, args: Args, flows: Sequence[int] = ()) -> None:
        """Draw one slice."""
        for track, open_ends in self._lanes:
            while open_ends and open_ends[-1] <= start:
                self._events.end(track, open_ends.pop())
            if not open_ends or (self._nest and end <= open_ends[-1]):
                break
        else:
            track, open_ends = self._new_lane()
        self._events.begin(track, start, name, category, args, flows)
        open_ends.append(end)

    def close(self) -> None:
        """End every slice that is still open."""
        for track, open_ends in self._lanes:
            while open_ends:
                self._events.end(track, open_ends.pop())

    def _new_lane(self) -> tuple[int, list[int]]:
        name = f"{self._name} ({len(self._lanes) + 1})" if self._lanes else self._name
        lane: tuple[int, list[int]] = (self._events.track(name, self._parent, self._rank), [])
        self._lanes.append(lane)
        return lane


def cut(text: str) -> str:
    """Return ``text``, shortened where it is longer than MAX_NAME."""
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
