//! Numbers to the base 36, in small letters.

/// Writes a number with as many digits as there is room for.
pub(crate) fn write_base36(out: &mut [u8], mut number: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(number % 36) as usize];
        number /= 36;
    }
}

/// Reads up to eleven digits, with or without zeros in front.
pub(crate) fn read_base36(digits: &[u8]) -> Option<u64> {
    if digits.len() > 11 {
        return None;
    }
    digits.iter().try_fold(0u64, |n, c| Some(n * 36 + u64::from((*c as char).to_digit(36)?)))
}
