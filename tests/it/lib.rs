//! The examples of the pages, which compile and run as doc tests.

#[cfg(doctest)]
mod pages {
    /// Runs the examples of the README.
    #[cfg(feature = "redis")]
    #[doc = include_str!("../../README.md")]
    struct Readme;

    /// Runs the examples of the page on settings.
    #[doc = include_str!("../../docs/choosing.md")]
    struct Choosing;

    /// Runs the examples of the page on stacks.
    #[cfg(feature = "axum")]
    #[doc = include_str!("../../docs/stacks.md")]
    struct Stacks;

    /// Runs the examples of the comparison.
    #[cfg(feature = "axum")]
    #[doc = include_str!("../../docs/comparison.md")]
    struct Comparison;

    /// Runs the examples of the page on security.
    #[cfg(feature = "axum")]
    #[doc = include_str!("../../docs/security.md")]
    struct Security;

    /// Runs the examples of the page on etcd.
    #[cfg(feature = "etcd")]
    #[doc = include_str!("../../docs/etcd.md")]
    struct Etcd;

    /// Runs the examples of the recipes.
    #[cfg(feature = "axum")]
    #[doc = include_str!("../../docs/recipes.md")]
    struct Recipes;

    /// Runs the examples of the page on observability.
    #[cfg(all(feature = "admin", feature = "metrics"))]
    #[doc = include_str!("../../docs/observability.md")]
    struct Observability;

    /// Runs the proof of the page on locks.
    #[doc = include_str!("../../docs/locks.md")]
    struct Locks;
}
