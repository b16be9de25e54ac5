#![no_main]

//! The first byte says what was asked, the second for how many places; the rest is what Redis
//! answers, as it stands on the wire, and once more as a hint.

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let [op, places, wire @ ..] = data {
        tower_semaphore::__fuzz::reply(*op, usize::from(*places), wire);
        tower_semaphore::__fuzz::hints(wire);
    }
});
